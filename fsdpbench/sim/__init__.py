"""A simulated accelerator for torch: tensors have shapes but no data; clock, memory and traces are modelled.

    from fsdpbench.sim import Simulation, load_profile

    sim = Simulation.start(load_profile("a100-80gb"), world_size=8, gpus_per_node=8)
    sim.init_process_group()
    model = Model().to("sim")          # from here on: ordinary training code

See `docs/simulator.md`.
"""

from typing import TYPE_CHECKING, Any

from fsdpbench.sim.model.profile import HardwareProfile, load_profile, profile_names

if TYPE_CHECKING:
    from fsdpbench.sim.simulation import SimulatedTrace, Simulation, preload

# fmt: off
__all__ = [
    "HardwareProfile", "SimulatedTrace", "Simulation", "load_profile", "preload", "profile_names",
]
# fmt: on


def __getattr__(name: str) -> Any:
    """Import `Simulation` and its values, which import torch, on first access."""
    if name in ("SimulatedTrace", "Simulation", "preload"):
        from fsdpbench.sim import simulation

        return getattr(simulation, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
