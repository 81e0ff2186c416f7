"""Search a space for its best configurations instead of sweeping all of it."""
