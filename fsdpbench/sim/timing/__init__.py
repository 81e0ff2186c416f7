"""The simulated clock: timeline, jitter, and the streams of backward."""
