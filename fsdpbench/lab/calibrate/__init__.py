"""Measures a machine with GPUs and writes the hardware profile that simulates it."""
