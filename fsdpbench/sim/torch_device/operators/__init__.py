"""Kernels of torch's operators on the simulated device."""
