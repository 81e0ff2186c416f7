"""A simulation under the sanitizer, for the tests of this folder."""

from __future__ import annotations

import torch

from fsdpbench.sim import Simulation, load_profile
from fsdpbench.sim.followers.sanitizer import Sanitizer


def start(*, with_group: bool = False) -> Sanitizer:
    """A simulated GPU of 8 whose uses of memory are followed."""
    simulation = Simulation.start(load_profile("a100-80gb"), world_size=8, gpus_per_node=8, sanitize=True)
    if with_group:
        simulation.init_process_group()
    assert simulation.sanitizer is not None
    return simulation.sanitizer


def kinds(sanitizer: Sanitizer) -> list[str]:
    """The kinds of all findings, in the order in which they were met."""
    return [finding.kind.value for finding in sanitizer.findings]


def matrix(size: int = 256) -> torch.Tensor:
    """A tensor of the device that the CPU knows to be written."""
    made = torch.zeros(size, size, device="sim")
    torch.sim.synchronize()
    return made
