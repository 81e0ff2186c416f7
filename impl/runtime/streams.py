"""Streams: one interface for devices that have streams and for the CPU, which has none.

``with stream:`` queues work on a stream, ``record`` records an event after the work queued up to now, and
``wait`` makes the stream (never the CPU) wait for an event. The CPU has one stream, the program itself. Its
events are ``None`` and waiting for them does nothing. Only collectives with ``async_op=True`` run
concurrently there.

Streams come from ``torch.get_device_module(device)``, so any device with the API of ``torch.cuda`` works.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, Protocol

import torch


def current_device(kind: str) -> torch.device:
    """Return the current device of type ``kind``, such as ``"cuda"``."""
    if kind == "cpu":
        return torch.device(kind)
    return torch.device(kind, torch.get_device_module(kind).current_device())


class Event(Protocol):
    """A recorded point of a stream, with the interface of ``torch.cuda.Event``."""

    def synchronize(self) -> None:
        """Block the CPU until the point is reached."""

    def query(self) -> bool:
        """Return whether the point is reached."""


class Nothing:
    """A no-op context manager without a Python call: `"".format` accepts any arguments and returns ""."""

    __enter__: Callable[..., Any] = "".format
    __exit__: Callable[..., Any] = "".format


class Stream(Nothing):
    """A queue of device work. This base class is for the CPU, where all queued work is already done."""

    def record(self) -> Event | None:
        """Record an event after the work queued on this stream up to now."""
        return None

    def wait(self, event: Event | None) -> None:
        """Make later work on this stream wait for ``event``."""

    def follow(self, other: "Stream") -> None:
        """Make later work on this stream wait for the work queued on ``other`` up to now."""

    def keep(self, tensor: torch.Tensor) -> None:
        """Tell the allocator that this stream uses ``tensor`` (``Tensor.record_stream``)."""


class _DeviceStream(Stream):
    """A stream of a device.

    Args:
        stream: the stream to use; ``None`` for the current stream, where the model computes.
    """

    def __init__(self, module: Any, stream: Any = None) -> None:
        self._module = module
        self._stream = stream
        self._entered: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> None:
        if self._stream is not None:
            context = self._module.stream(self._stream)
            context.__enter__()
            self._entered.append(context)

    def __exit__(self, *exc_info: Any) -> None:
        if self._stream is not None:
            self._entered.pop().__exit__(*exc_info)

    def record(self) -> Event | None:
        return (self._stream or self._module.current_stream()).record_event()

    def wait(self, event: Event | None) -> None:
        if event is not None:
            (self._stream or self._module.current_stream()).wait_event(event)

    def follow(self, other: "Stream") -> None:
        self.wait(other.record())

    def keep(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(self._stream or self._module.current_stream())


# The stream of the CPU: the program itself. A single object, so that comparisons find one stream.
_PROGRAM = Stream()


def stream_of(stream: Any, device: torch.device) -> "Stream":
    """Wrap a stream of ``device``, ``None`` for the current one. A CPU always has the program's stream."""
    if device.type in ("cpu", "meta"):
        return _PROGRAM
    return _DeviceStream(torch.get_device_module(device), stream)


def new_stream(device: torch.device, priority: int = 0) -> "Stream":
    """Return a new stream of ``device``. A ``priority`` of -1 is higher than 0."""
    if device.type in ("cpu", "meta"):
        return _PROGRAM
    return stream_of(torch.get_device_module(device).Stream(priority=priority), device)


class Streams:
    """The streams of one device that a tree of FSDP units shares.

    ``copy_in`` casts and copies all-gather inputs, ``all_gather`` gathers, ``reduce_scatter`` reduces,
    ``all_reduce`` sums over replicas, ``to_host`` copies to the host. The first three have high priority, so
    that their small copies do not wait behind large kernels; ``all_reduce``, between nodes, does not.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.compute = stream_of(None, device)
        self.has_streams = self.compute is not _PROGRAM
        self.copy_in = new_stream(device, -1)
        self.all_gather = new_stream(device, -1)
        self.reduce_scatter = new_stream(device, -1)
        self.all_reduce = new_stream(device)

    @cached_property
    def to_host(self) -> "Stream":
        """Return the stream that copies to the host. It is made at first use: only CPU offload needs it."""
        return new_stream(self.device)

    def count_retries(self) -> int:
        """Return how often this device's caching allocator freed its cache and retried, since the start."""
        if not self.has_streams:
            return 0
        stats = torch.get_device_module(self.device).memory_stats(self.device)
        return int(stats.get("num_alloc_retries", 0))


class HostLink:
    """The compute stream and a stream for each direction of the link to the host, which can overlap."""

    def __init__(self, device: torch.device) -> None:
        self.compute = stream_of(None, device)
        self.to_host, self.from_host = new_stream(device), new_stream(device)
