"""Sweeps: what there is to choose from and can run here, plans, and many configurations, resumable."""
