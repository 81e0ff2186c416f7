"""A simulated cluster for a test, and layers whose units have round sizes; runs in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

WIDTH = 4096
LAYERS = 12
UNIT_BYTES = 4 * WIDTH * WIDTH


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False, device="sim")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


@contextmanager
def simulated(ranks: int = 8, *, sanitize: bool = False) -> Iterator[torch.device]:
    from fsdpbench.sim import Simulation, load_profile

    simulation = Simulation.start(
        load_profile("a100-80gb"), world_size=ranks, gpus_per_node=8, sanitize=sanitize
    )
    simulation.init_process_group()
    try:
        yield torch.device("sim", 0)
    finally:
        dist.destroy_process_group()
