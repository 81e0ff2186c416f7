"""The model families, one a file, and what they share."""
