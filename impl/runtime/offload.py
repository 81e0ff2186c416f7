"""CPU offload: shards, gradients and the optimizer step live on the host.

::

    host     shard ------+                                            +--> gradient, optimizer step
                         | copy-in lane                               | give-back lane
    device               +--> own part of the gather buffer           +-- reduced shard
                                        [all-gather] ... [reduce-scatter]

A shard goes straight to its place in the gather buffer, or through a staging buffer where it is cast on the
way, so that the CPU casts nothing. Gradients are copied back on a lane of their own: both directions of the
link work at the same time, and no reduce-scatter waits for a copy. A gradient is handed to the optimizer's
parameters when it has arrived: asked for whenever another one starts its way, waited for at the end of
backward. So the CPU never waits in the middle of backward, and what it does with gradients (sums of
accumulated ones, hooks such as an optimizer in backward) it does with values that are there.

What a front end does: make its unit with a ``HostOffload`` and its shard with ``new_shard``, and not move the
parameters to the device before. On a CPU device the same path runs, with copies inside the host's memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..shared.settings import MemoryHandover
from .buffer import FlatBuffer
from .streams import Lane, Lanes, Mark

if TYPE_CHECKING:
    from .unit import Unit

HOST = torch.device("cpu")


@dataclass(frozen=True)
class HostOffload:
    """That a unit's shard is on the host, and whether in pinned memory.

    Pinned memory is copied while the CPU goes on; other memory is copied in slower, and holds the CPU on the
    way back.
    """

    pins: bool

    @classmethod
    def decide(cls, pin_memory: bool, device: torch.device) -> HostOffload:
        """For parameters computed with on ``device``; a CPU has nothing to pin memory for."""
        return cls(pin_memory and device.type != "cpu")


def new_shard(
    numel: int, dtype: torch.dtype, device: torch.device, offload: HostOffload | None
) -> torch.Tensor:
    """Zeros for a flat shard of parameters that are on ``device``; on the host if offloaded.

    Those of the meta device stay there until they are materialised.
    """
    if offload is None or device.type == "meta":
        return torch.zeros(numel, dtype=dtype, device=device)
    shard = torch.zeros(numel, dtype=dtype, device=HOST)
    return shard.pin_memory() if offload.pins else shard


def check_on_host(unit: Unit) -> None:
    """Raise RuntimeError if an offloaded unit's parameters were materialised on the device."""
    if unit.offload is not None and unit.shard.device.type not in ("cpu", "meta"):
        names = ", ".join(f"'{parameter.fqn}'" for parameter in unit.parameters[:3])
        raise RuntimeError(
            f"FSDP parameters should be materialized on CPU when enabling CPU offloading, but those of unit "
            f"'{unit.name}' ({names}, ...) are on {unit.shard.device}: call "
            'module.to_empty(device="cpu"), or load a CPU state dict'
        )


class ShardCopy:
    """Writes a unit's shard to where its all-gather wants it: a cast, a copy from the host, or both.

    Args:
        numel: elements of the shard.
        device: what is computed on.
    """

    def __init__(
        self, numel: int, dtypes: tuple[torch.dtype, torch.dtype], device: torch.device, from_host: bool
    ) -> None:
        self._numel = numel
        self._stored, self._computed = dtypes
        self._device = device
        self._stages = from_host and self._stored != self._computed
        self._staged: FlatBuffer | None = None
        self._own: FlatBuffer | None = None

    def write(self, target: torch.Tensor, shard: torch.Tensor, lane: Lane) -> None:
        """Copy ``shard`` into ``target``, on ``lane``, which is entered."""
        if not self._stages:
            target.copy_(shard, non_blocking=True)
            return
        if self._staged is None:
            self._staged = FlatBuffer(self._numel, self._stored, self._device, lane)
        else:
            self._staged.take()
        self._staged.tensor.copy_(shard, non_blocking=True)
        target.copy_(self._staged.tensor)
        self._staged.free()

    def take(self, lane: Lane) -> FlatBuffer:
        """A buffer for the result, where it is not written into the gather buffer; ``lane`` is entered."""
        if self._own is None:
            self._own = FlatBuffer(self._numel, self._computed, self._device, lane)
        else:
            self._own.take()
        return self._own

    def free(self) -> None:
        """Give the buffer of ``take`` back, if there is one."""
        if self._own is not None:
            self._own.free()


@dataclass(frozen=True, slots=True)
class _Return:
    """A reduced gradient on its way to the host."""

    unit: Unit
    gradient: torch.Tensor
    which: Sequence[int]
    offsets: Sequence[int]
    mark: Mark | None

    def deliver(self) -> None:
        self.unit.presentation.deliver(self.gradient, self.which, self.offsets)


class GradientReturns:
    """Copies reduced gradients to the host and delivers them there, in their order."""

    def __init__(self, lanes: Lanes, mode: MemoryHandover) -> None:
        self._lanes = lanes
        self._mode = mode
        self._on_the_way: deque[_Return] = deque()
        self._read: deque[tuple[torch.Tensor, Mark | None]] = deque()

    def start(
        self, unit: Unit, gradient: torch.Tensor, which: Sequence[int], offsets: Sequence[int], lane: Lane
    ) -> None:
        """Send off ``gradient`` (1-D, on the device, written on ``lane``)."""
        assert unit.offload is not None
        back = self._lanes.give_back
        back.follow(lane)
        with back:
            host = gradient.to(HOST, non_blocking=unit.offload.pins)
            mark = back.record()
        self._keep(gradient, mark)
        self._on_the_way.append(_Return(unit, host, which, offsets, mark))
        while self._on_the_way and _passed(self._on_the_way[0].mark):
            self._on_the_way.popleft().deliver()

    def finish(self) -> None:
        """Wait for all of them and deliver them: the optimizer may come."""
        while self._on_the_way:
            arriving = self._on_the_way.popleft()
            if arriving.mark is not None:
                arriving.mark.synchronize()
            arriving.deliver()
        self._read.clear()

    def discard(self) -> None:
        """Wait for all of them and deliver nothing."""
        for arriving in self._on_the_way:
            if arriving.mark is not None:
                arriving.mark.synchronize()
        self._on_the_way.clear()
        self._read.clear()

    def _keep(self, gradient: torch.Tensor, mark: Mark | None) -> None:
        """Memory of the reduction lanes that the copy still reads: one more turn, then they wait for it."""
        if self._mode is MemoryHandover.RECORD_STREAM:
            self._lanes.give_back.keep(gradient)
            return
        self._read.append((gradient, mark))
        while len(self._read) > 1:
            _, mark = self._read.popleft()
            self._lanes.reduce.wait(mark)
            self._lanes.all_reduce.wait(mark)


def _passed(mark: Mark | None) -> bool:
    return mark is None or mark.query()
