"""Spaces of configurations: presets, conditions, files, and the list that results from them."""
