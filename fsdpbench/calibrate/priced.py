"""What the simulator's cost models see of a piece of work: the bytes that its kernels move.

A bandwidth efficiency only means something against the bytes that the simulator will divide it by. So the
work runs once on meta tensors, and the simulator's own price list says what it moves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch

from fsdpbench.sim.costs import KernelCosts
from fsdpbench.sim.hardware.profile import HardwareProfile
from fsdpbench.sim.prices import price
from fsdpbench.torch_internals import TorchDispatchMode


def bytes_moved(run: Callable[[torch.device], Callable[[], object]], profile: HardwareProfile) -> float:
    """Bytes that the memory-bound kernels of ``run`` move, where ``run(device)`` prepares it."""
    meter = _Meter(profile)
    work = run(torch.device("meta"))
    with meter:
        work()
    return meter.seconds * profile.memory_bandwidth


class _Meter(TorchDispatchMode):
    """Adds up what operators cost on a machine whose only cost is its memory's peak bandwidth."""

    def __init__(self, profile: HardwareProfile) -> None:
        super().__init__()
        whole = MappingProxyType(dict.fromkeys(profile.bandwidth.efficiency, 1.0))
        bandwidth = dataclasses.replace(profile.bandwidth, efficiency=whole, floor_us=0.0)
        self._costs = KernelCosts(dataclasses.replace(profile, bandwidth=bandwidth))
        self.seconds = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.seconds += price(func, args, kwargs or {}, out, self._costs).duration_ns / 1e9
        return out
