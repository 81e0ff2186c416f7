"""What is measured in a trace: idle time, memory, lateness, stragglers, counts."""
