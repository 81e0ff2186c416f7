"""Events of a trace: device activity, FSDP units, steps and phases."""
