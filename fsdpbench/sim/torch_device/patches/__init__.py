"""Changes to torch while the simulated device runs."""
