"""Baselines and sweeps, read from disk."""
