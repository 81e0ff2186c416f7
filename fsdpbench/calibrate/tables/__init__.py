"""Library tables of hardware profiles (`fsdpbench.sim.library_sections`) from measured operators."""
