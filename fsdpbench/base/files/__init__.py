"""Safe file access: bounded reads, atomic writes and locks."""
