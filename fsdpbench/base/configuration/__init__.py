"""A configuration (`config.py`): its settings, its steps, its key; the other files are one option each."""
