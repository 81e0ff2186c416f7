"""Published runs, and the files they come from."""
