"""Streams of device work: one interface for devices that have them and for the CPU, which has none.

Work is put on a stream inside ``with stream:``; ``record`` records an event at the point reached, ``wait``
makes the stream (never the CPU) wait for such an event. On the CPU there is one stream, the program itself:
events are ``None`` and waiting for one is nothing. What runs beside the program there are collectives with
``async_op=True``.

Streams are made by ``torch.get_device_module(device)``, so any device with the API of ``torch.cuda`` works.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch


class Event(Protocol):
    """A recorded point of a stream; what ``torch.cuda.Event`` offers."""

    def synchronize(self) -> None:
        """Block the CPU until the point is reached."""

    def query(self) -> bool:
        """Return whether the point is reached."""


class Stream:
    """A queue of device work. This base class is the CPU's: everything already happened."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exc_info: Any) -> None:
        return None

    def record(self) -> Event | None:
        """Record the point that this stream has reached."""
        return None

    def wait(self, event: Event | None) -> None:
        """Let later work of this stream start only after ``event``."""

    def follow(self, other: Stream) -> None:
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

    def follow(self, other: Stream) -> None:
        self.wait(other.record())

    def keep(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(self._stream or self._module.current_stream())


def stream_of(stream: Any, device: torch.device) -> Stream:
    """Return the stream that the user made, as one of ours; the CPU's, if ``device`` is one."""
    if device.type == "cpu":
        return Stream()
    return _DeviceStream(torch.get_device_module(device), stream)


class Streams:
    """The streams of one device that a tree of FSDP units shares.

    ``copy_in`` prepares what is gathered, ``all_gather`` gathers, ``reduce_scatter`` reduces, ``all_reduce``
    sums over replicas. The first three have high priority so that their small copies are not kept behind
    large kernels; those that overlap between nodes (``all_reduce``) have not. ``to_host`` copies to the host.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.has_streams = device.type not in ("cpu", "meta")
        self._to_host: Stream | None = None
        if not self.has_streams:
            stream = Stream()
            self.compute = self.copy_in = self.all_gather = self.reduce_scatter = self.all_reduce = stream
            return
        module = torch.get_device_module(device)
        self.compute = _DeviceStream(module)
        self.copy_in = _DeviceStream(module, module.Stream(priority=-1))
        self.all_gather = _DeviceStream(module, module.Stream(priority=-1))
        self.reduce_scatter = _DeviceStream(module, module.Stream(priority=-1))
        self.all_reduce = _DeviceStream(module, module.Stream(priority=0))

    @property
    def to_host(self) -> Stream:
        """Return the stream that copies to the host; made at its first use: only CPU offload has one."""
        if self._to_host is None:
            module = torch.get_device_module(self.device) if self.has_streams else None
            self._to_host = Stream() if module is None else _DeviceStream(module, module.Stream(priority=0))
        return self._to_host

    def count_retries(self) -> int:
        """Return how often this device's allocator had to free its cache and try again, since the start."""
        if not self.has_streams:
            return 0
        stats = torch.get_device_module(self.device).memory_stats(self.device)
        return int(stats.get("num_alloc_retries", 0))


class HostLink:
    """Streams of computation and of both directions of the link to the host, which work at the same time."""

    def __init__(self, device: torch.device) -> None:
        if device.type == "cpu":
            self.compute = self.to_host = self.from_host = Stream()
            return
        module = torch.get_device_module(device)
        self.compute = _DeviceStream(module)
        self.to_host = _DeviceStream(module, module.Stream(priority=0))
        self.from_host = _DeviceStream(module, module.Stream(priority=0))
