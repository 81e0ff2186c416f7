"""Published runs, and the files that they come from."""
