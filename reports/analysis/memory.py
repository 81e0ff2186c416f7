"""Memory from a trace's events: peaks, what is alive at the peak, fragmentation, allocator retries.

An allocation belongs to the phase and the FSDP annotation in which the CPU made it:

    allocated   .-'``'-.        alive at the peak: allocations before it whose address was not freed since;
           _.-'         '-.     memory whose allocation is not in the trace existed before it
         start     ^ peak"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from fsdpbench.reports.analysis.activity import UNKNOWN_TIME, Activity
from fsdpbench.reports.analysis.naming import allocator_rows
from fsdpbench.reports.analysis.records import Ns, Record, seconds
from fsdpbench.reports.analysis.units import NOTHING, FsdpSpans, running_index
from fsdpbench.reports.analysis.windows import Mark, Window, containing
from fsdpbench.reports.readers import MemoryEvents, Trace
from fsdpbench.reports.readers.trace import Bool, Int64

CPU_DEVICE = 0
"""torch's DeviceType of the host."""

COMPUTATION = "computation"
_ELSEWHERE = "other_phases"


@dataclass(frozen=True)
class Holding(Record):
    """Bytes alive at the peak that were allocated in one phase, by one unit, in one kind of FSDP event
    (`computation` outside of FSDP events). phase and unit are None if the annotations do not say."""

    phase: str | None
    unit: str | None
    event: str
    bytes: int


@dataclass(frozen=True)
class Retry(Record, time="", freed="freed_bytes", calls="driver_calls"):
    """An allocator retry: its time (ns on the trace's clock), its place, bytes requested and bytes freed.

    cost: ns that computation stops around it (the CPU waits for the device, frees and allocates, and only
    then launches again); None on a CPU trace.  driver: ns that the CPU spent around it, from the first to the
    last of the driver's allocation calls between two launches; calls: the number of these calls.
    """

    time: Ns
    step: int | None
    phase: str | None
    unit: str | None
    bytes: int
    freed: int
    cost: Ns | None
    calls: int = 0
    driver: Ns = 0


@dataclass(frozen=True)
class MemoryAnalysis:
    """Peaks in bytes; None if the trace has no memory events, or (`peak_active`) does not record it.

    peak_phase: the phase of the allocation peak.  peaks: the most allocated bytes in each phase.
    at_peak: what was alive at the peak, largest first;
    before_trace: bytes alive at the peak but allocated before the trace.  unused_at_peak: bytes reserved but
    not allocated at the peak (fragmentation and cache).  allocator_time: ns that the CPU spent in the
    driver's allocation calls within the steps; allocator_calls: the number of these calls.
    """

    peak_allocated: int | None = None
    peak_reserved: int | None = None
    peak_active: int | None = None
    peak_phase: str | None = None
    unused_at_peak: int | None = None
    at_peak: tuple[Holding, ...] = ()
    before_trace: int | None = None
    retries: tuple[Retry, ...] = ()
    retries_per_step: tuple[int, ...] = ()
    allocator_calls: int = 0
    allocator_time: int = 0
    peaks: dict[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, object]:
        return {
            "peak_bytes": {
                kind: getattr(self, f"peak_{kind}") for kind in ("allocated", "active", "reserved")
            },
            "peak_phase": self.peak_phase,
            "peak_bytes_by_phase": self.peaks,
            "unused_at_peak_bytes": self.unused_at_peak,
            "at_peak": [holding.to_dict() for holding in self.at_peak],
            "before_trace_bytes": self.before_trace,
            "alloc_retries": len(self.retries),
            "alloc_retries_per_step": list(self.retries_per_step),
            "retries": [retry.to_dict() for retry in self.retries],
            "allocator_calls": {"count": self.allocator_calls, "time_s": seconds(self.allocator_time)},
        }


def device_events(trace: Trace) -> Bool:
    """Return a mask over the memory events: the accelerator's if there are any, else the host's."""
    on_device = trace.memory.device_type != CPU_DEVICE
    return on_device if on_device.any() else ~on_device


def analyze_memory(
    trace: Trace, activity: Activity, steps: Sequence[Window], phases: Sequence[Mark], spans: FsdpSpans
) -> MemoryAnalysis:
    """Return peaks over the whole trace, and retries and allocator calls by the CPU's step.

    Args:
        activity, spans: the device work and the FSDP annotations of `trace`.
        steps, phases: windows of the steps, and marks of the phases, in order and disjoint.
    """
    places = _Places(steps, phases, spans)
    retries = _retries(trace, activity, places)
    per_step = tuple(sum(retry.step == step.index for retry in retries) for step in steps)
    calls, time = _allocator_calls(trace, steps)
    without_events = MemoryAnalysis(
        retries=retries, retries_per_step=per_step, allocator_calls=calls, allocator_time=time
    )
    mask = device_events(trace)
    if not mask.any():
        return without_events
    memory = trace.memory
    rows = np.flatnonzero(mask)
    peak = int(rows[np.argmax(memory.allocated[rows])])
    allocated, reserved = int(memory.allocated[peak]), int(memory.reserved[peak])
    at_peak = _holdings(memory, rows[rows <= peak], places)
    names = [*(mark.name for mark in phases), _ELSEWHERE]
    tops = np.zeros(len(names), np.int64)
    np.maximum.at(tops, containing(phases, memory.time[rows]), memory.allocated[rows])  # -1: elsewhere
    return replace(
        without_events,
        peak_allocated=allocated,
        # The host's allocator reserves nothing and reports 0.
        peak_reserved=int(memory.reserved[rows].max()) or None,
        peak_active=int(memory.active[rows].max()) if int(memory.active[rows].min()) >= 0 else None,
        peak_phase=places.phase(memory.time[[peak]])[0],
        unused_at_peak=max(reserved - allocated, 0) if reserved else None,
        at_peak=at_peak,
        before_trace=max(allocated - sum(holding.bytes for holding in at_peak), 0),
        peaks={name: top for top, name in sorted(zip(tops.tolist(), names, strict=True))},  # greatest of each
    )


class _Places:
    """Places of times in the program: step, phase, unit and FSDP event on the annotated thread."""

    def __init__(self, steps: Sequence[Window], phases: Sequence[Mark], spans: FsdpSpans) -> None:
        self.steps, self.phases, self.spans = steps, phases, spans
        self.lane = int(np.bincount(spans.lane).argmax()) if len(spans) else 0
        self.running = running_index(spans)

    def step(self, times: Int64) -> list[int | None]:
        """Return the number of the step at each time."""
        found = containing([step.mark for step in self.steps], times).tolist()
        return [self.steps[place].index if place >= 0 else None for place in found]

    def phase(self, times: Int64) -> list[str | None]:
        """Return the phase at each time."""
        found = containing(self.phases, times).tolist()
        return [self.phases[place].name if place >= 0 else None for place in found]

    def unit_and_event(self, times: Int64) -> list[tuple[str | None, str]]:
        lane = np.full(len(times), self.lane)
        annotated = self.spans.index.innermost(lane, times)
        running, units = self.running
        computing = running.innermost(lane, times)
        found: list[tuple[str | None, str]] = []
        for row, place in zip(annotated.tolist(), computing.tolist(), strict=True):
            number = self.spans.unit[row] if row != NOTHING else units[place] if place != NOTHING else None
            unit = None if number is None else self.spans.units[number]
            found.append((unit, COMPUTATION if row == NOTHING else self.spans.events[self.spans.event[row]]))
        return found


def _holdings(memory: MemoryEvents, rows: Int64, places: _Places) -> tuple[Holding, ...]:
    """Return the live allocations among these events (sorted by time), summed by place."""
    # The last event of each address decides: it is alive after an allocation, not after a free.
    _, last = np.unique(memory.address[rows][::-1], return_index=True)
    alive = rows[len(rows) - 1 - last]
    alive = alive[memory.bytes[alive] > 0]
    times = memory.time[alive]
    sums: dict[tuple[str | None, str | None, str], int] = {}
    for phase, (unit, event), size in zip(
        places.phase(times), places.unit_and_event(times), memory.bytes[alive].tolist(), strict=True
    ):
        sums[phase, unit, event] = sums.get((phase, unit, event), 0) + size
    ordered = sorted(sums.items(), key=lambda item: (-item[1], str(item[0])))
    return tuple(Holding(phase, unit, event, size) for (phase, unit, event), size in ordered)


def _retries(trace: Trace, activity: Activity, places: _Places) -> tuple[Retry, ...]:
    retries = trace.retries
    if not len(retries):
        return ()
    columns = zip(
        retries.time.tolist(),
        places.step(retries.time),
        places.phase(retries.time),
        places.unit_and_event(retries.time),
        retries.bytes.tolist(),
        retries.freed.tolist(),
        _costs(activity, retries.time),
        _driver_calls(trace, activity, retries.time),
        strict=True,
    )
    return tuple(
        Retry(time, step, phase, unit, size, freed, cost, *driver)
        for time, step, phase, (unit, _), size, freed, cost, driver in columns
    )


def _costs(activity: Activity, times: Int64) -> list[int | None]:
    """Return how long (ns) computation stops around each retry: from the end of the work launched before
    it to the start of the work after it.

    If several retries are in one gap, the first gets all of it.
    """
    main = activity.work.mainline()
    if activity.kind == "cpu" or not len(main.row):
        return [None] * len(times)
    launch, start, reached = main.launch, main.start, np.maximum.accumulate(main.end)
    after = np.searchsorted(launch, times, side="left")
    there = (after > 0) & (after < len(launch))
    after = np.minimum(np.maximum(after, 1), len(launch) - 1)
    gap = np.maximum(start[after] - reached[after - 1], 0)
    there[1:] &= after[1:] != after[:-1]
    return [int(cost) for cost in np.where(there, gap, 0)]


def _driver_calls(trace: Trace, activity: Activity, times: Int64) -> list[tuple[int, int]]:
    """Return for each retry the driver's allocation calls between the launches around it, and the ns from the
    start of the first to the end of the last. Of retries between the same launches, the first gets all."""
    rows = allocator_rows(trace)
    start, end = trace.events.start[rows], trace.events.ends(rows)
    launches = np.sort(activity.work.launch[activity.work.launch != UNKNOWN_TIME])
    found: list[tuple[int, int]] = []
    seen: set[int] = set()
    for place, time in zip(np.searchsorted(launches, times).tolist(), times.tolist(), strict=True):
        since = int(launches[place - 1]) if place else time
        until = int(launches[place]) if place < len(launches) else time + 1
        low, high = np.searchsorted(start, [since, until])
        if low == high or place in seen:
            found.append((0, 0))
            continue
        seen.add(place)
        found.append((int(high - low), int(end[high - 1] - start[low])))
    return found


def _allocator_calls(trace: Trace, steps: Sequence[Window]) -> tuple[int, int]:
    """Return how often the CPU called the driver's allocation functions within the steps, and their ns."""
    rows = allocator_rows(trace)
    start = trace.events.start[rows]
    inside = np.zeros(len(rows), np.bool_)
    for step in steps:
        inside |= (start >= step.mark.start) & (start < step.mark.end)
    return int(inside.sum()), int(trace.events.duration[rows][inside].sum())


@dataclass(frozen=True, eq=False)
class MemoryCurve:
    """int64 columns: time (ns after the trace's first event), allocated, active (empty if the trace does not
    record it) and reserved (bytes); and of the retries the times, bytes requested and bytes freed."""

    time: Int64
    allocated: Int64
    reserved: Int64
    retry_time: Int64
    retry_bytes: Int64
    retry_freed: Int64
    active: Int64

    def __len__(self) -> int:
        return len(self.time)


def memory_curve(
    trace: Trace, *, max_points: int = 2000, origin: int | None = None, clock: Clock | None = None
) -> MemoryCurve:
    """Return the accelerator's curve, or the host's if the trace has no memory events of an accelerator.

    The curve has about `max_points`: each stretch of events keeps its highest and lowest allocation, and its
    highest reservation, so that peaks keep their place and height. `origin`: ns that counts as 0, by default
    the start of the trace's first event. `clock`: maps CPU times, at which memory is allocated, to the
    curve's times (`device_clock`); by default they are the same.
    """
    memory = trace.memory
    mask = device_events(trace)
    by_clock = clock or (lambda times: times)
    time, allocated, reserved = by_clock(memory.time[mask]), memory.allocated[mask], memory.reserved[mask]
    kept = _keep(allocated, reserved, max_points)
    active = memory.active[mask]
    known = len(active) > 0 and int(active.min()) >= 0
    start = int(trace.events.start.min()) if origin is None else origin
    return MemoryCurve(
        time[kept] - start,
        allocated[kept],
        reserved[kept],
        by_clock(trace.retries.time) - start,
        trace.retries.bytes,
        trace.retries.freed,
        active[kept] if known else active[:0],
    )


def _keep(allocated: Int64, reserved: Int64, most: int) -> Int64:
    count = len(allocated)
    if count <= most:
        return np.arange(count)
    # At most three points per stretch, and both ends of the curve.
    edges = np.linspace(0, count, max(most // 3, 1) + 1).astype(np.int64)
    kept = {0, count - 1}
    for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        if high > low:
            kept.add(low + int(np.argmax(allocated[low:high])))
            kept.add(low + int(np.argmin(allocated[low:high])))
            kept.add(low + int(np.argmax(reserved[low:high])))
    return np.array(sorted(kept), np.int64)


# The CPU allocates ahead; the work that uses the memory runs later.
#
# CPU      alloc A | launch a | alloc B | launch b          a CPU that is far ahead allocates early
# device                          [   a   ][   b   ]
# A, B by the device's clock      A         B

Clock = Callable[[Int64], Int64]


def device_clock(activity: Activity) -> Clock | None:
    """Return a map from CPU times to when the device began the work launched next; None if that is unknown
    (a CPU trace, or one without launches).

    The stream that computes most is the clock. After its last launch the map follows the CPU's time, but not
    before that work has ended. The map is monotonic.
    """
    main = activity.work.mainline()
    if activity.kind != "gpu" or not len(main.launch):
        return None
    starts = np.maximum.accumulate(main.start)
    end = int(main.end.max())

    def clock(times: Int64) -> Int64:
        following = np.searchsorted(main.launch, times, side="left")
        last = len(starts) - 1
        reached: Int64 = np.where(following <= last, starts[np.minimum(following, last)], end)
        return np.maximum(times, reached)

    return clock
