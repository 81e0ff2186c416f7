"""Measurement of a machine with GPUs, and the hardware profile that is written from it."""
