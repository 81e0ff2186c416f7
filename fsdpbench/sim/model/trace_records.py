"""What a trace says of device work, kept beside it until the timeline knows its times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fsdpbench.sim.model.timeline import DEFAULT_STREAM

if TYPE_CHECKING:
    from fsdpbench.sim.model.trace_recorder import TraceRecorder


@dataclass(slots=True)
class KernelRecord:
    """What the trace says of a kernel."""

    name: str
    launch_start_ns: int
    launch_end_ns: int

    def write(self, trace: TraceRecorder, stream: int, start_ns: int, end_ns: int) -> None:
        """Add the kernel to a trace, now that its times are known."""
        trace.kernel(self.name, stream, self.launch_start_ns, self.launch_end_ns, start_ns, end_ns)


@dataclass(slots=True)
class MemcpyRecord:
    """What the trace says of a copy between host and device."""

    kind: str
    nbytes: int
    launch_start_ns: int
    launch_end_ns: int

    def write(self, trace: TraceRecorder, stream: int, start_ns: int, end_ns: int) -> None:
        """Add the copy to a trace, now that its times are known."""
        launch = self.launch_start_ns, self.launch_end_ns
        trace.memcpy(self.kind, stream, *launch, start_ns, end_ns, nbytes=self.nbytes)


@dataclass(slots=True)
class EventRecord:
    """What the trace knows of a recorded event, so that waits can refer to it."""

    event_id: int
    stream: int
    correlation: int

    @classmethod
    def write(
        cls, trace: TraceRecorder, event_id: int, stream: int, start_ns: int, end_ns: int
    ) -> EventRecord:
        """Add the record of event number ``event_id``, which took the CPU from start to end."""
        return cls(event_id, trace_stream(stream), trace.runtime("cudaEventRecord", start_ns, end_ns))


@dataclass(slots=True)
class WaitRecord:
    """What the trace says of a stream that waits for an event."""

    event: EventRecord
    launch_start_ns: int
    launch_end_ns: int

    def write(self, trace: TraceRecorder, stream: int, start_ns: int, end_ns: int) -> None:
        """Add the wait to a trace, now that its times are known."""
        event = self.event.event_id, self.event.stream, self.event.correlation
        trace.stream_wait_event(stream, *event, self.launch_start_ns, self.launch_end_ns, start_ns, end_ns)


def trace_stream(number: int) -> int:
    """The number that a trace shows for a stream: CUDA's default stream is 7, others come later."""
    return 7 if number == DEFAULT_STREAM else 16 + 4 * number
