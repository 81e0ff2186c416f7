"""Observers of the simulated clock and memory: races, holders of memory, noise, CUDA graphs."""
