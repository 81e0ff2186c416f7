"""Observers of the simulated clock and memory: races, memory by owner, noise, CUDA graphs."""
