"""What of torch is changed while the simulated device runs."""
