"""The ground of all rooms: errors, numbers, settings, configurations, and files read and written safely."""
