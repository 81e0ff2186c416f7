"""What a trace says of device work, kept beside it until the timeline knows its times."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdpbench.sim.timing.timeline import DEFAULT_STREAM

if TYPE_CHECKING:
    from fsdpbench.sim.trace import TraceRecorder


class KernelRecord:
    """What the trace says of a kernel."""

    __slots__ = ("launch_end_ns", "launch_start_ns", "name")

    def __init__(self, name: str, launch_start_ns: int, launch_end_ns: int) -> None:
        self.name = name
        self.launch_start_ns = launch_start_ns
        self.launch_end_ns = launch_end_ns

    def write(self, trace: TraceRecorder, stream: int, start_ns: int, end_ns: int) -> None:
        """Add the kernel to a trace, now that its times are known."""
        trace.kernel(self.name, stream, self.launch_start_ns, self.launch_end_ns, start_ns, end_ns)


class MemcpyRecord:
    """What the trace says of a copy between host and device."""

    __slots__ = ("kind", "launch_end_ns", "launch_start_ns", "nbytes")

    def __init__(self, kind: str, nbytes: int, launch_start_ns: int, launch_end_ns: int) -> None:
        self.kind = kind
        self.nbytes = nbytes
        self.launch_start_ns = launch_start_ns
        self.launch_end_ns = launch_end_ns

    def write(self, trace: TraceRecorder, stream: int, start_ns: int, end_ns: int) -> None:
        """Add the copy to a trace, now that its times are known."""
        trace.memcpy(
            self.kind, stream, self.launch_start_ns, self.launch_end_ns, start_ns, end_ns, nbytes=self.nbytes
        )


class EventRecord:
    """What the trace knows of a recorded event, so that waits can refer to it."""

    __slots__ = ("correlation", "event_id", "stream")

    def __init__(self, event_id: int, stream: int, correlation: int) -> None:
        self.event_id = event_id
        self.stream = stream
        self.correlation = correlation

    @classmethod
    def write(
        cls, trace: TraceRecorder, event_id: int, stream: int, start_ns: int, end_ns: int
    ) -> EventRecord:
        """Add the record of event number ``event_id``, which took the CPU from start to end."""
        correlation = trace.event_record(trace_stream(stream), event_id, start_ns, end_ns)
        return cls(event_id, trace_stream(stream), correlation)


class WaitRecord:
    """What the trace says of a stream that waits for an event."""

    __slots__ = ("event", "launch_end_ns", "launch_start_ns")

    def __init__(self, event: EventRecord, launch_start_ns: int, launch_end_ns: int) -> None:
        self.event = event
        self.launch_start_ns = launch_start_ns
        self.launch_end_ns = launch_end_ns

    def write(self, trace: TraceRecorder, stream: int, start_ns: int, end_ns: int) -> None:
        """Add the wait to a trace, now that its times are known."""
        event = self.event
        trace.stream_wait_event(
            stream,
            event.event_id,
            event.stream,
            event.correlation,
            self.launch_start_ns,
            self.launch_end_ns,
            start_ns,
            end_ns,
        )


def trace_stream(number: int) -> int:
    """The number that a trace shows for a stream: CUDA's default stream is 7, others come later."""
    return 7 if number == DEFAULT_STREAM else 16 + 4 * number
