"""The machine without torch: hardware, clock, memory, costs and the trace's file."""
