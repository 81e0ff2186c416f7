"""A configuration (`config.py`): its settings, steps and key. Each other file holds one of its options."""
