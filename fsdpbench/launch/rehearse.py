"""Before a rank of `--device cuda` begins: is it the real cuda?"""

from __future__ import annotations

from fsdpbench.base.configuration.config import Config
from fsdpbench.base.configuration.simulated_cuda import simulated_cuda
from fsdpbench.engine.devices.base import Placement


def rehearse(config: Config, placement: Placement) -> None:
    """Let "cuda" be the simulated device, if it is what the environment asks for (`script/rehearsal.py`)."""
    if config.device == "cuda" and simulated_cuda() is not None:
        from fsdpbench.script.rehearsal import rehearse_where_asked

        rehearse_where_asked(placement, config.ranks_per_node)
