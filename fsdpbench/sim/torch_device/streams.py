"""`torch.sim.Stream` and `torch.sim.Event`: what `torch.cuda`'s do, on the simulated timeline."""

from __future__ import annotations

from typing import Any

import torch

from fsdpbench.sim.model.timeline import DEFAULT_STREAM, Marker
from fsdpbench.sim.model.trace_records import EventRecord, WaitRecord, trace_stream
from fsdpbench.sim.torch_device.accelerator import ACCELERATOR

_PRIVATE_USE_1 = 20  # c10::DeviceType::PrivateUse1


class Stream(torch.Stream):
    """A queue of device work. ``device`` and ``priority`` are taken as `torch.cuda.Stream` takes them.

    Priorities have no effect: kernels do not preempt each other in the simulation.
    """

    number: int

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Stream:
        number = kwargs.get("stream_id")
        if number is None:
            ACCELERATOR.require_started()
            number = ACCELERATOR.timeline.add_stream()
        elif number in ACCELERATOR.streams:
            return ACCELERATOR.streams[number]
        stream = super().__new__(cls, stream_id=number, device_index=0, device_type=_PRIVATE_USE_1)
        stream.number = number
        ACCELERATOR.streams[number] = stream
        return stream

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.priority = priority

    def wait_event(self, event: Event) -> None:  # type: ignore[override]
        """Work queued from now on waits for the event."""
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:  # type: ignore[override]
        """Work queued from now on waits for all that is queued on another stream by now."""
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:  # type: ignore[override]
        """Record an event (a new one by default) at this point."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        """Whether all queued work is done."""
        ACCELERATOR.timeline.cpu += ACCELERATOR.cpu_costs.event_ns
        return ACCELERATOR.timeline.is_idle(self.number)

    def synchronize(self) -> None:
        """Block the CPU until all queued work is done."""
        timeline = ACCELERATOR.timeline
        start = timeline.cpu
        timeline.cpu += ACCELERATOR.cpu_costs.synchronize_ns
        timeline.wait_for_stream(self.number)
        if ACCELERATOR.trace is not None:
            ACCELERATOR.trace.stream_synchronize(trace_stream(self.number), start, timeline.cpu)

    def __enter__(self) -> Stream:
        if ACCELERATOR.backward.is_active:
            ACCELERATOR.backward.arrive()
        self._previous = [*getattr(self, "_previous", ()), ACCELERATOR.stream]
        switch_to(self.number)
        return self

    def __exit__(self, *exc_info: object) -> None:
        switch_to(self._previous.pop())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, torch.Stream) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        return hash(("sim", self.stream_id))

    def __repr__(self) -> str:
        return f"<torch.sim.Stream {self.number}>"


class StreamContext:
    """`torch.sim.stream(stream)`: makes a stream current for a while; None changes nothing."""

    __slots__ = ("_previous", "_stream")

    def __init__(self, stream: Stream | None) -> None:
        self._stream = stream
        self._previous = DEFAULT_STREAM

    def __enter__(self) -> StreamContext:
        if self._stream is not None:
            if ACCELERATOR.backward.is_active:
                ACCELERATOR.backward.arrive()
            self._previous = ACCELERATOR.stream
            switch_to(self._stream.stream_id)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._stream is not None:
            switch_to(self._previous)


class Event:
    """A point in a stream. Unrecorded events have always passed, as in CUDA."""

    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
        device: Any = None,
    ) -> None:
        self.enable_timing = enable_timing
        self.marker: Marker | None = None
        self._trace: EventRecord | None = None

    def record(self, stream: torch.Stream | None = None) -> None:
        """Move the event to the present end of a stream (the current one by default)."""
        timeline = ACCELERATOR.timeline
        number = _number(stream)
        start = timeline.cpu
        timeline.cpu += ACCELERATOR.cpu_costs.event_ns
        self.marker = timeline.record(number)
        if ACCELERATOR.trace is not None:
            ACCELERATOR.events_traced += 1
            self._trace = EventRecord.write(
                ACCELERATOR.trace, ACCELERATOR.events_traced, number, start, timeline.cpu
            )

    def wait(self, stream: torch.Stream | None = None) -> None:
        """Make a stream (the current one by default) wait for the event."""
        timeline = ACCELERATOR.timeline
        start = timeline.cpu
        timeline.cpu += ACCELERATOR.cpu_costs.event_ns
        if self.marker is None:
            return
        number = _number(stream)
        payload = None
        if ACCELERATOR.trace is not None and self._trace is not None:
            payload = WaitRecord(self._trace, start, timeline.cpu)
        timeline.make_wait(number, self.marker, payload)

    def query(self) -> bool:
        """Whether the device has reached the event."""
        ACCELERATOR.timeline.cpu += ACCELERATOR.cpu_costs.event_ns
        return self.marker is None or ACCELERATOR.timeline.has_passed(self.marker)

    def synchronize(self) -> None:
        """Block the CPU until the device reaches the event."""
        timeline = ACCELERATOR.timeline
        start = timeline.cpu
        timeline.cpu += ACCELERATOR.cpu_costs.event_ns
        if self.marker is not None:
            timeline.wait_for(self.marker)
        if ACCELERATOR.trace is not None and self._trace is not None:
            trace = self._trace
            ACCELERATOR.trace.event_synchronize(
                trace.event_id, trace.stream, trace.correlation, start, timeline.cpu
            )

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds between two recorded events that were made with ``enable_timing=True``."""
        if not (self.enable_timing and end_event.enable_timing):
            raise RuntimeError(
                "both events must be made with enable_timing=True to measure time between them"
            )
        if self.marker is None or end_event.marker is None:
            raise RuntimeError("both events must be recorded before the time between them is known")
        for marker in (self.marker, end_event.marker):
            if not ACCELERATOR.timeline.has_passed(marker):
                raise RuntimeError("both events must have completed: synchronize first")
        return (end_event.marker.time - self.marker.time) / 1e6


def _number(stream: torch.Stream | None) -> int:
    """A stream's number; None: the current one's."""
    if stream is not None:
        return int(stream.stream_id)
    if ACCELERATOR.backward.is_active:
        ACCELERATOR.backward.arrive()
    return ACCELERATOR.stream


def switch_to(number: int) -> None:
    """Make a stream the current one."""
    ACCELERATOR.stream = number
    ACCELERATOR.backward.note_switch(number)
    ACCELERATOR.timeline.cpu += ACCELERATOR.cpu_costs.stream_ns
