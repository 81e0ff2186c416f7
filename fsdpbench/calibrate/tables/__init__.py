"""Library tables of hardware profiles (`fsdpbench.sim.hardware.library_sections`) from measured operators."""
