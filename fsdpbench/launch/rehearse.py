"""Before a rank of `--device cuda` begins: is it the real cuda?"""

from __future__ import annotations

from fsdpbench.base.configuration.config import Config
from fsdpbench.base.configuration.simulated_cuda import simulated_cuda
from fsdpbench.engine.devices.base import Placement
from fsdpbench.engine.devices.detection import number_of_launcher


def rehearse(config: Config, placement: Placement) -> None:
    """Let "cuda" be the simulated device, if it is what the environment asks for (`script/rehearsal.py`)."""
    if config.device == "cuda" and simulated_cuda() is not None:
        from fsdpbench.script.rehearsal import rehearse_where_asked

        rehearse_where_asked(placement, config.ranks_per_node)


def rehearse_launched() -> None:
    """Do so for a process that torchrun started, if any, with the clock of the host."""
    from fsdpbench.script.rehearsal import rehearse_where_asked

    world = number_of_launcher("WORLD_SIZE", 1)
    rank, local = number_of_launcher("RANK", 0), number_of_launcher("LOCAL_RANK", 0)
    per_node = number_of_launcher("LOCAL_WORLD_SIZE", world)
    rehearse_where_asked(Placement(rank, world, local), per_node, host_clock=True)
