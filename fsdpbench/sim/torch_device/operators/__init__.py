"""The kernels behind torch's operators on the simulated device."""
