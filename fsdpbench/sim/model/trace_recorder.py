"""Recorder that collects a simulated rank's events and writes them as a Kineto trace.

Every simulated operator is recorded, so a call only appends one tuple. The rest is derived when the file is
written:

- *external ids*: the innermost operator or annotation around each launch, found with a stack over the CPU's
events in order of start (events nest, because one simulated CPU thread makes them);
- *spans on streams* (`gpu_user_annotation`): for each annotation and stream, from the start of the first
kernel launched inside it to the end of the last.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdpbench.sim.model.profile import HardwareProfile
from fsdpbench.sim.model.timeline import DEFAULT_STREAM, Meeting
from fsdpbench.sim.model.trace_writer import (
    NAMES,
    CudaSync,
    DeviceEvent,
    HostEvent,
    HostKind,
    InstantEvent,
    MemoryEvent,
    TraceHeader,
    write_trace,
)


class TraceRecorder:
    """Events of one rank in simulated time, written as Kineto JSON.

    All `*_ns` are integer nanoseconds of the simulated clock. `stream` numbers are CUDA's, as Kineto shows
    them. Calls may come in any order of time, but CPU spans must nest.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        profile: HardwareProfile,
        process_groups: Sequence[Mapping[str, Any]] = (),
        gpus_per_node: int | None = None,
    ) -> None:
        per_node = gpus_per_node or profile.gpus_per_node
        self._header = TraceHeader(rank, world_size, profile, tuple(process_groups), per_node)
        self._host: list[HostEvent] = []
        self._device: list[DeviceEvent] = []
        self._syncs: list[CudaSync] = []
        self._memory: list[MemoryEvent] = []
        self._instants: list[InstantEvent] = []
        self._correlation = 0
        self.open_spans: list[tuple[str, int]] = []
        """Names and starts of the spans that have not ended, outermost first."""

    def begin_span(self, name: str, start_ns: int) -> int:
        """Open an annotation; return its start."""
        self.open_spans.append((name, start_ns))
        return start_ns

    def end_span(self, name: str, start_ns: int, end_ns: int) -> None:
        """Record an annotation. One that began before this trace is not among the open ones."""
        if self.open_spans[-1:] == [(name, start_ns)]:
            self.open_spans.pop()
        self.annotation(name, start_ns, end_ns)

    def cpu_op(self, name: str, start_ns: int, end_ns: int, inputs: str = "") -> None:
        """Record an operator on the main CPU thread. `inputs`: from `call_text` and `inputs_text`."""
        self._host.append((start_ns, -end_ns, -len(self._host), HostKind.OPERATOR, name, 0, inputs))

    def annotation(self, name: str, start_ns: int, end_ns: int) -> None:
        """Record a span of `torch.profiler.record_function` on the main CPU thread."""
        self._host.append((start_ns, -end_ns, -len(self._host), HostKind.ANNOTATION, name, 0, ""))

    def step(self, index: int, start_ns: int, end_ns: int) -> None:
        """Record `ProfilerStep#index`."""
        self.annotation(f"ProfilerStep#{index}", start_ns, end_ns)

    def runtime(self, name: str, start_ns: int, end_ns: int) -> int:
        """Record a runtime call on the CPU (cudaMalloc, cudaEventQuery, ...); return its correlation id."""
        self._correlation += 1
        correlation = self._correlation
        self._host.append((start_ns, -end_ns, -len(self._host), HostKind.RUNTIME, name, correlation, ""))
        return correlation

    def kernel(
        self,
        name: str,
        stream: int,
        launch_start_ns: int,
        launch_end_ns: int,
        start_ns: int,
        end_ns: int,
        args: Mapping[str, Any] | None = None,
        call: str = "cudaLaunchKernel",
    ) -> int:
        """Record a kernel with its launch and the flow between them; return the correlation id.

        `args` are added to the kernel's own (JSON values; Kineto's keys). `call`: the launching call.
        """
        correlation = self.runtime(call, launch_start_ns, launch_end_ns)
        self._device.append(("kernel", name, stream, start_ns, end_ns, correlation, args))
        return correlation

    def memcpy(
        self,
        kind: str,
        stream: int,
        launch_start_ns: int,
        launch_end_ns: int,
        start_ns: int,
        end_ns: int,
        nbytes: int,
    ) -> int:
        """Record a copy of kind HtoD, DtoH or DtoD; return its correlation id."""
        words = {"HtoD": "Pageable -> Device", "DtoH": "Device -> Pageable", "DtoD": "Device -> Device"}
        correlation = self.runtime("cudaMemcpyAsync", launch_start_ns, launch_end_ns)
        name = f"Memcpy {kind} ({words[kind]})"
        rate = nbytes / (end_ns - start_ns) if end_ns > start_ns else 0
        args = {"bytes": nbytes, "memory bandwidth (GB/s)": rate}
        self._device.append(("gpu_memcpy", name, stream, start_ns, end_ns, correlation, args))
        return correlation

    def stream_wait_event(
        self,
        stream: int,
        event_id: int,
        record_stream: int,
        record_correlation: int,
        start_ns: int,
        end_ns: int,
        wait_start_ns: int,
        wait_end_ns: int,
    ) -> None:
        """Record cudaStreamWaitEvent on the CPU, and the stream's wait (wait_*_ns) for an event.

        The wait is written as an instant at its end, because analyses count the time between start and end of
        `cuda_sync` events as busy, and a waiting stream is idle.
        """
        correlation = self.runtime("cudaStreamWaitEvent", start_ns, end_ns)
        wait = "Stream Wait Event", stream, wait_end_ns, wait_end_ns, correlation, event_id
        self._syncs.append((*wait, record_stream, record_correlation))

    def event_synchronize(
        self, event_id: int, record_stream: int, record_correlation: int, start_ns: int, end_ns: int
    ) -> None:
        """Record that the CPU waits for event `event_id`."""
        correlation = self.runtime("cudaEventSynchronize", start_ns, end_ns)
        self._syncs.append(
            ("Event Sync", -1, start_ns, end_ns, correlation, event_id, record_stream, record_correlation)
        )

    def stream_synchronize(self, stream: int, start_ns: int, end_ns: int) -> None:
        """Record that the CPU waits for a stream."""
        correlation = self.runtime("cudaStreamSynchronize", start_ns, end_ns)
        self._syncs.append(("Stream Sync", stream, end_ns, end_ns, correlation, None, None, None))

    def device_synchronize(self, start_ns: int, end_ns: int) -> None:
        """Record that the CPU waits for all streams."""
        correlation = self.runtime("cudaDeviceSynchronize", start_ns, end_ns)
        self._syncs.append(("Context Sync", -1, start_ns, end_ns, correlation, None, None, None))

    def memory(
        self, address: int, nbytes: int, allocated: int, reserved: int, time_ns: int, active: int = -1
    ) -> None:
        """Record that memory was allocated (`nbytes` > 0) or freed (< 0), with the totals afterwards.

        `active` (includes blocks that other streams still use) is not in torch's traces. -1: unknown.
        """
        self._memory.append((time_ns, address, nbytes, allocated, active, reserved))

    def alloc_retry(self, nbytes: int, freed: int, time_ns: int) -> None:
        """Record that the allocator released its cache (`freed` bytes) and retried `nbytes`."""
        self._instants.append(("[alloc_retry]", time_ns, {"Bytes": nbytes, "Freed": freed}))

    def write(self, path: Path | str) -> Path:
        """Write the gzip file `path` (equal events give equal bytes) and return the path."""
        target = Path(path)
        write_trace(target, self._header, self._host, self._device, self._syncs, self._memory, self._instants)
        return target


def _ranks_text(ranks: Sequence[int]) -> str:
    """Return the ranks of a group as text; large groups are shortened as in torch."""
    if len(ranks) <= 30:
        return str(list(ranks))
    head = ", ".join(str(rank) for rank in ranks[:29])
    return f"[{head}, ..., {ranks[-1]}]"


_KINDS, _DTYPES = NAMES["collectives"], NAMES["dtypes"]
_REDUCING = frozenset({"reduce_scatter", "all_reduce", "barrier"})


def _kernel_of(kind: str, dtype: str) -> str:
    """Return the kernel name of a collective; raises `ValueError` for an unknown kind."""
    if kind not in _KINDS:
        raise ValueError(f"collective {kind!r}: known are {', '.join(_KINDS)}")
    if _KINDS[kind][0] == "SendRecv":
        return "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
    reduction = f"_Sum_{_DTYPES.get(dtype, 'f32')}" if kind in _REDUCING else ""
    return f"ncclDevKernel_{_KINDS[kind][0]}{reduction}_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


@dataclass(slots=True)
class CollectiveRecord:
    """Trace fields of a collective.

    `kind` as in `Network.collective_ns`, `dtype` in torch's spelling (`Float`); elements are those of one
    rank's input and output.
    """

    kind: str
    dtype: str
    in_elems: int
    out_elems: int
    group_name: str
    group_description: str
    ranks: Sequence[int]
    launch_start_ns: int
    launch_end_ns: int
    meeting: Meeting | None = None
    """If other ranks run too: the kernel waits for them from this rank's arrival on."""

    def write(self, trace: TraceRecorder, stream: int, start_ns: int, end_ns: int) -> None:
        """Add the collective to a trace once its times are known; `ValueError` for an unknown kind."""
        if self.meeting is not None:
            start_ns = self.meeting.since
        name = _kernel_of(self.kind, self.dtype)
        args = {
            "Collective name": _KINDS[self.kind][1],
            "In msg nelems": self.in_elems,
            "Out msg nelems": self.out_elems,
            "Group size": len(self.ranks),
            "dtype": self.dtype,
            "In split size": "[]",
            "Out split size": "[]",
            "Process Group Name": self.group_name,
            "Process Group Description": self.group_description,
            "Process Group Ranks": _ranks_text(self.ranks),
        }
        times = self.launch_start_ns, self.launch_end_ns, start_ns, end_ns
        trace.kernel(name, stream, *times, args, "cudaLaunchKernelExC")


@dataclass(slots=True)
class KernelRecord:
    """Trace fields of a launched kernel."""

    name: str
    launch_start_ns: int
    launch_end_ns: int

    def write(self, trace: TraceRecorder, stream: int, start_ns: int, end_ns: int) -> None:
        """Add the kernel to a trace once its times are known."""
        trace.kernel(self.name, stream, self.launch_start_ns, self.launch_end_ns, start_ns, end_ns)


@dataclass(slots=True)
class MemcpyRecord:
    """Trace fields of a copy between host and device."""

    kind: str
    nbytes: int
    launch_start_ns: int
    launch_end_ns: int

    def write(self, trace: TraceRecorder, stream: int, start_ns: int, end_ns: int) -> None:
        """Add the copy to a trace once its times are known."""
        launch = self.launch_start_ns, self.launch_end_ns
        trace.memcpy(self.kind, stream, *launch, start_ns, end_ns, nbytes=self.nbytes)


@dataclass(slots=True)
class EventRecord:
    """Trace fields of a recorded event, to which waits refer."""

    event_id: int
    stream: int
    correlation: int

    @classmethod
    def write(
        cls, trace: TraceRecorder, event_id: int, stream: int, start_ns: int, end_ns: int
    ) -> "EventRecord":
        """Add the record call of event number `event_id`, which took the CPU from start to end."""
        return cls(event_id, trace_stream(stream), trace.runtime("cudaEventRecord", start_ns, end_ns))


@dataclass(slots=True)
class WaitRecord:
    """Trace fields of a stream's wait for an event."""

    event: "EventRecord"
    launch_start_ns: int
    launch_end_ns: int

    def write(self, trace: TraceRecorder, stream: int, start_ns: int, end_ns: int) -> None:
        """Add the wait to a trace once its times are known."""
        event = self.event.event_id, self.event.stream, self.event.correlation
        trace.stream_wait_event(stream, *event, self.launch_start_ns, self.launch_end_ns, start_ns, end_ns)


def trace_stream(number: int) -> int:
    """Return the stream's number in traces: 7 for CUDA's default stream, larger ones for others."""
    return 7 if number == DEFAULT_STREAM else 16 + 4 * number
