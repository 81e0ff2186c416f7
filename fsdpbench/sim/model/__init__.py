"""Model of the machine, without torch: hardware, clock, memory, costs and the trace file."""
