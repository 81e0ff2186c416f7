"""Memory peaks for two readers: the script, which may reset them when it likes, and the bench, step by step.

The allocator has one set of peaks. Whoever resets it hands the other what it would lose.
"""

from __future__ import annotations

from typing import Any

import torch

from fsdpbench.devices.base import AllocatorReadings, StepMemory
from fsdpbench.sim import Simulation
from fsdpbench.sim.accelerator import DEVICE_TYPE

_PEAK = ".peak"


class _Reader:
    """Peaks since this reader's last reset."""

    def __init__(self) -> None:
        self.held: dict[str, int] = {}

    def hold(self, stats: dict[str, int]) -> None:
        """Keep the peaks of `stats`, which are about to be reset."""
        for name, value in stats.items():
            if name.endswith(_PEAK):
                self.held[name] = max(value, self.held.get(name, 0))

    def read(self, stats: dict[str, int]) -> dict[str, int]:
        """`stats` with this reader's peaks."""
        return {**stats, **{name: max(value, stats[name]) for name, value in self.held.items()}}


class Peaks:
    """Both readers. Made after the simulation has started and before `torch.cuda` is mapped."""

    def __init__(self, simulation: Simulation) -> None:
        self._allocator = simulation.accelerator.allocator
        self._script, self._bench = _Reader(), _Reader()
        self._readings = AllocatorReadings()
        module: Any = torch.get_device_module(DEVICE_TYPE)
        module.memory_stats = lambda device=None: self._script.read(self._allocator.memory_stats())
        module.reset_peak_memory_stats = lambda device=None: self._reset(self._script, self._bench)

    def take(self) -> StepMemory:
        """Peaks and counts since the last call."""
        stats = self._bench.read(self._allocator.memory_stats())
        self._reset(self._bench, self._script)
        return self._readings.since_last(stats)

    def _reset(self, reader: _Reader, other: _Reader) -> None:
        other.hold(self._allocator.memory_stats())
        reader.held.clear()
        self._allocator.reset_peak_memory_stats()
