"""Streams as lanes: one interface for devices that have streams and for the CPU, which has none.

A lane is a queue of device work. Work is put on it inside ``with lane:``; ``record`` marks the point reached,
``wait`` makes the lane (never the CPU) wait for such a mark. On the CPU there is one lane, the program
itself: marks are ``None`` and waiting for one is nothing. What runs beside the program there are collectives
with ``async_op=True``.

Lanes are made by ``torch.get_device_module(device)``, so any device with the API of ``torch.cuda`` works.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Protocol

import torch


class Mark(Protocol):
    """A recorded point of a lane; what ``torch.cuda.Event`` offers."""

    def synchronize(self) -> None:
        """Block the CPU until the point is reached."""

    def query(self) -> bool:
        """Whether the point is reached."""


class Lane:
    """A queue of device work. This base class is the CPU's: everything already happened."""

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def record(self) -> Mark | None:
        """Mark the point that this lane has reached."""
        return None

    def wait(self, mark: Mark | None) -> None:
        """Let later work of this lane start only after ``mark``."""

    def follow(self, other: Lane) -> None:
        """Let later work of this lane start only after all that ``other`` has been given so far."""
        self.wait(other.record())

    def keep(self, tensor: torch.Tensor) -> None:
        """Tell the allocator that this lane uses ``tensor`` (``Tensor.record_stream``)."""


class _StreamLane(Lane):
    """A stream of our own."""

    def __init__(self, module: Any, priority: int = 0, stream: Any = None) -> None:
        self._module = module
        self.stream = module.Stream(priority=priority) if stream is None else stream
        self._entered: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> None:
        context = self._module.stream(self.stream)
        context.__enter__()
        self._entered.append(context)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.pop().__exit__(kind, error, trace)

    def record(self) -> Mark | None:
        return self.stream.record_event()

    def wait(self, mark: Mark | None) -> None:
        if mark is not None:
            self.stream.wait_event(mark)

    def keep(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(self.stream)


class _CurrentLane(Lane):
    """Whatever stream is current: where the model computes."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def record(self) -> Mark | None:
        return self._module.current_stream().record_event()

    def wait(self, mark: Mark | None) -> None:
        if mark is not None:
            self._module.current_stream().wait_event(mark)

    def keep(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(self._module.current_stream())


def lane_of(stream: Any, device: torch.device) -> Lane:
    """The lane of a stream that the user made; the CPU's, which has none, where ``device`` is one."""
    if device.type == "cpu":
        return Lane()
    return _StreamLane(torch.get_device_module(device), stream=stream)


class Lanes:
    """The lanes of one device that a tree of FSDP units shares.

    ``cast`` prepares what is gathered, ``gather`` all-gathers, ``reduce`` reduce-scatters, ``all_reduce``
    sums over replicas. The first three have high priority so that their small copies are not kept behind
    large kernels; those that overlap between nodes (``all_reduce``) have not. ``give_back`` copies to the
    host.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.has_streams = device.type not in ("cpu", "meta")
        self._give_back: Lane | None = None
        if not self.has_streams:
            lane = Lane()
            self.compute = self.cast = self.gather = self.reduce = self.all_reduce = lane
            return
        module = torch.get_device_module(device)
        self.compute = _CurrentLane(module)
        self.cast = _StreamLane(module, priority=-1)
        self.gather = _StreamLane(module, priority=-1)
        self.reduce = _StreamLane(module, priority=-1)
        self.all_reduce = _StreamLane(module, priority=0)

    @property
    def give_back(self) -> Lane:
        """The lane that copies to the host; made at its first use, since only CPU offload has one."""
        if self._give_back is None:
            module = torch.get_device_module(self.device) if self.has_streams else None
            self._give_back = Lane() if module is None else _StreamLane(module, priority=0)
        return self._give_back

    def count_retries(self) -> int:
        """How often this device's allocator had to free its cache and try again, since the start."""
        if not self.has_streams:
            return 0
        stats = torch.get_device_module(self.device).memory_stats(self.device)
        return int(stats.get("num_alloc_retries", 0))
