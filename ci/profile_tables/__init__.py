"""Library tables of hardware profiles (`fsdpbench.sim.model.sections`) from measured operators."""
