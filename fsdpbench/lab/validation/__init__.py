"""Comparison of the simulation with published measurements: cases, predictions, errors."""
