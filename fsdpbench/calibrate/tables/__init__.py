"""Library tables of hardware profiles (`fsdpbench.sim.model.library_sections`) from measured operators."""
