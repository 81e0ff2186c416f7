"""CPU offload: reduced gradients on their way to the host (``offload.py`` has the picture)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...shared.settings import MemoryHandover
from ..offload import HOST
from ..streams import Event, Stream, Streams
from ..unit import Unit


@dataclass(frozen=True, slots=True)
class _Return:
    """A reduced gradient on its way to the host."""

    unit: Unit
    gradient: torch.Tensor
    which: Sequence[int]
    offsets: Sequence[int]
    event: Event | None

    def deliver(self) -> None:
        self.unit.presentation.deliver(self.gradient, self.which, self.offsets)


class GradientReturns:
    """Copies reduced gradients to the host and delivers them there, in their order."""

    def __init__(self, streams: Streams, mode: MemoryHandover) -> None:
        self._streams = streams
        self._mode = mode
        self._on_the_way: deque[_Return] = deque()
        self._read: deque[tuple[torch.Tensor, Event | None]] = deque()

    def start(
        self, unit: Unit, gradient: torch.Tensor, which: Sequence[int], offsets: Sequence[int], stream: Stream
    ) -> None:
        """Send off ``gradient`` (1-D, on the device, written on ``stream``)."""
        assert unit.offload is not None
        back = self._streams.to_host
        back.follow(stream)
        with back:
            host = gradient.to(HOST, non_blocking=unit.offload.pins)
            event = back.record()
        self._keep(gradient, event)
        self._on_the_way.append(_Return(unit, host, which, offsets, event))
        while self._on_the_way and _passed(self._on_the_way[0].event):
            self._on_the_way.popleft().deliver()

    def finish(self) -> None:
        """Wait for all of them and deliver them: the optimizer may come."""
        while self._on_the_way:
            arriving = self._on_the_way.popleft()
            if arriving.event is not None:
                arriving.event.synchronize()
            arriving.deliver()
        self._read.clear()

    def discard(self) -> None:
        """Wait for all of them and deliver nothing."""
        for arriving in self._on_the_way:
            if arriving.event is not None:
                arriving.event.synchronize()
        self._on_the_way.clear()
        self._read.clear()

    def _keep(self, gradient: torch.Tensor, event: Event | None) -> None:
        """Memory of the reduction streams that the copy still reads: one more turn, then they wait for it."""
        if self._mode is MemoryHandover.RECORD_STREAM:
            self._streams.to_host.keep(gradient)
            return
        self._read.append((gradient, event))
        while len(self._read) > 1:
            _, event = self._read.popleft()
            self._streams.reduce_scatter.wait(event)
            self._streams.all_reduce.wait(event)


def _passed(event: Event | None) -> bool:
    return event is None or event.query()
