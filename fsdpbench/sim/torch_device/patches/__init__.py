"""Changes to torch while the simulated device is in use."""
