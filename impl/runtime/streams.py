"""Streams of device work: one interface for devices that have them and for the CPU, which has none.

Work is put on a stream inside ``with stream:``; ``record`` records an event at the point reached, ``wait``
makes the stream (never the CPU) wait for such an event. On the CPU there is one stream, the program itself:
events are ``None`` and waiting for one is nothing. What runs beside the program there are collectives with
``async_op=True``.

Streams are made by ``torch.get_device_module(device)``, so any device with the API of ``torch.cuda`` works.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, Protocol

import torch


def current_device(kind: str) -> torch.device:
    """Return this rank's device of a type, such as ``"cuda"``: the current one."""
    if kind == "cpu":
        return torch.device(kind)
    return torch.device(kind, torch.get_device_module(kind).current_device())


class Event(Protocol):
    """A recorded point of a stream; what ``torch.cuda.Event`` offers."""

    def synchronize(self) -> None:
        """Block the CPU until the point is reached."""

    def query(self) -> bool:
        """Return whether the point is reached."""


class Nothing:
    """A context that does nothing, without a call in Python: `format` takes anything and returns nothing."""

    __enter__: Callable[..., Any] = "".format
    __exit__: Callable[..., Any] = "".format


class Stream(Nothing):
    """A queue of device work. This base class is the CPU's: everything already happened."""

    def record(self) -> Event | None:
        """Record the point that this stream has reached."""
        return None

    def wait(self, event: Event | None) -> None:
        """Let later work of this stream start only after ``event``."""

    def follow(self, other: "Stream") -> None:
        """Let later work of this stream start only after all that ``other`` has been given so far."""

    def keep(self, tensor: torch.Tensor) -> None:
        """Tell the allocator that this stream uses ``tensor`` (``Tensor.record_stream``)."""


class _DeviceStream(Stream):
    """A stream of a device.

    Args:
        stream: a stream of our own; ``None`` for whatever stream is current, where the model computes.
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


# The CPU's: the program itself. One object, so that what is on it is seen to be on one stream.
_PROGRAM = Stream()


def stream_of(stream: Any, device: torch.device) -> "Stream":
    """Return a stream of ``device`` as one of ours, ``None`` for the current one; the CPU's, if it is one."""
    if device.type in ("cpu", "meta"):
        return _PROGRAM
    return _DeviceStream(torch.get_device_module(device), stream)


def new_stream(device: torch.device, priority: int = 0) -> "Stream":
    """Return another stream of ``device``; -1 is the higher ``priority``."""
    if device.type in ("cpu", "meta"):
        return _PROGRAM
    return stream_of(torch.get_device_module(device).Stream(priority=priority), device)


class Streams:
    """The streams of one device that a tree of FSDP units shares.

    ``copy_in`` prepares what is gathered, ``all_gather`` gathers, ``reduce_scatter`` reduces, ``all_reduce``
    sums over replicas. The first three have high priority so that their small copies are not kept behind
    large kernels; those that overlap between nodes (``all_reduce``) have not. ``to_host`` copies to the host.
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
        """Return the stream that copies to the host; made at its first use: only CPU offload has one."""
        return new_stream(self.device)

    def count_retries(self) -> int:
        """Return how often this device's allocator had to free its cache and try again, since the start."""
        if not self.has_streams:
            return 0
        stats = torch.get_device_module(self.device).memory_stats(self.device)
        return int(stats.get("num_alloc_retries", 0))


class HostLink:
    """Streams of computation and of both directions of the link to the host, which work at the same time."""

    def __init__(self, device: torch.device) -> None:
        self.compute = stream_of(None, device)
        self.to_host, self.from_host = new_stream(device), new_stream(device)
