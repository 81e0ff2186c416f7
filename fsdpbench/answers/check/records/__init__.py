"""Baselines and sweeps as they are read from disk."""
