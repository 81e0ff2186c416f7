"""Activity of a GPU, or of a rank's threads on a CPU trace: computation, communication, copies.

Both kinds of trace give the same tables, so later analysis does not distinguish them:

    GPU   computation = kernels, communication = NCCL/RCCL kernels, copies = memcpy and memset on streams
          (synchronization records are waiting, not work, and do not count)
    CPU   computation = operators outside the process group's own threads, communication = the spans of gloo,
          mpi or ucc, from their start to their completion"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from fsdpbench.reports.analysis import intervals
from fsdpbench.reports.analysis.intervals import Intervals
from fsdpbench.reports.analysis.naming import (
    COLLECTIVE_TYPES,
    CollectiveType,
    collective_type,
    is_communication_kernel,
    is_cpu_collective,
    is_cpu_computation,
    is_issue,
)
from fsdpbench.reports.analysis.peaks import Links
from fsdpbench.reports.analysis.units import NOTHING, FsdpSpans
from fsdpbench.reports.readers import MISSING, Category, CollectiveInfo, Trace, dtype_bytes
from fsdpbench.reports.readers.trace import Bool, Columns, Float64, Int8, Int32, Int64

UNKNOWN_TIME = np.iinfo(np.int64).min
"""Launch time of an event without a recorded launch."""


_MEANT = ("all_gather", "reduce_scatter", "all_reduce")
_STAND_INS = (CollectiveType.ALL_TO_ALL, CollectiveType.SEND_RECV, CollectiveType.OTHER)


@dataclass(frozen=True, eq=False)
class Work(Columns):
    """Events of the device in order of their start: kernels and copies (GPU), operators and spans (CPU).

    row: row in the trace.  launch, launch_lane: when and on which thread the CPU launched it (`UNKNOWN_TIME`
    and `MISSING` if the trace does not say).  stream: MISSING on a CPU trace.
    """

    row: Int64
    start: Int64
    end: Int64
    launch: Int64
    launch_lane: Int32
    stream: Int32
    is_communication: Bool
    is_copy: Bool

    def mainline(self) -> "Work":
        """Return the computation of the stream with the most computation, in launch order.

        Computation on other streams (casts, work after a reduction) runs beside it and delays nothing.
        """
        rows = np.flatnonzero(~self.is_communication & ~self.is_copy & (self.launch != UNKNOWN_TIME))
        stream = self.stream[rows]
        streams = np.unique(stream)
        if len(streams):
            duration = self.end[rows] - self.start[rows]
            busy = np.bincount(np.searchsorted(streams, stream), weights=duration)
            rows = rows[stream == streams[int(np.argmax(busy))]]
        return self.select(rows[np.argsort(self.launch[rows], kind="stable")])

    def asked(self) -> Int64:
        """Return the time (ns) that assigns an event to a step or phase: its launch, else its start."""
        return np.where(self.launch == UNKNOWN_TIME, self.start, self.launch)


@dataclass(frozen=True, eq=False)
class Collectives:
    """The collectives among the work, one row each. kind: index into `COLLECTIVE_TYPES`; message and wire:
    bytes, MISSING if unknown; `roof`: peak bytes per second of the links, 0 if unknown; leads: false for the
    second and later rows of one collective (broadcasts, one per rank, that make one all-gather)."""

    work: Work
    kind: Int8
    message: Int64
    wire: Int64
    roof: Float64
    leads: Bool

    def __len__(self) -> int:
        return len(self.kind)


@dataclass(frozen=True, eq=False)
class Activity:
    """Disjoint interval sets and the tables they came from. `kind`: "gpu" or "cpu"."""

    kind: str
    work: Work
    collectives: Collectives
    communication: Intervals
    computation: Intervals
    overlapped: Intervals
    exposed: Intervals
    compute_only: Intervals
    copies: Intervals


def find_activity(trace: Trace, spans: FsdpSpans, links: Links | None = None) -> Activity:
    """Return the activity of device events if the trace has any, else of operators. `spans`: the trace's FSDP
    annotations; `links`: the links of its collectives, if known."""
    device_rows = trace.rows(Category.KERNEL, Category.MEMCPY, Category.MEMSET)
    work = _device_work(trace, device_rows) if len(device_rows) else _cpu_work(trace)
    computing = ~work.is_communication & ~work.is_copy
    computation = intervals.of(work.start[computing], work.end[computing])
    communication = intervals.of(work.start[work.is_communication], work.end[work.is_communication])
    copies = intervals.of(work.start[work.is_copy], work.end[work.is_copy])
    exposed = intervals.subtract(communication, computation)
    alone = intervals.subtract(intervals.subtract(copies, computation), communication)
    return Activity(
        kind="gpu" if len(device_rows) else "cpu",
        work=work,
        collectives=_collectives(trace, work.select(work.is_communication), spans, links),
        communication=communication,
        computation=computation,
        overlapped=intervals.intersect(communication, computation),
        exposed=exposed,
        compute_only=intervals.union(intervals.subtract(computation, communication), alone),
        copies=alone,
    )


def _device_work(trace: Trace, rows: Int64) -> Work:
    events = trace.events
    rows = trace.by_start(rows)
    launch, lane = _launches(trace, rows)
    is_kernel = events.category[rows] == Category.KERNEL
    named = trace.names_that(is_communication_kernel)[events.name[rows]]
    described = np.isin(rows, np.fromiter(trace.collectives, np.int64, len(trace.collectives)))
    communication = is_kernel & (named | described)
    start, end, stream = events.start[rows], events.ends(rows), events.stream[rows]
    return Work(rows, start, end, launch, lane, stream, communication, ~is_kernel)


def _launches(trace: Trace, rows: Int64) -> tuple[Int64, Int32]:
    """Return the start (ns) and the thread of the runtime call with the same correlation number."""
    events = trace.events
    calls = trace.rows(Category.RUNTIME)
    calls = calls[events.correlation[calls] > 0]
    launch = np.full(len(rows), UNKNOWN_TIME, np.int64)
    lane = np.full(len(rows), MISSING, np.int32)
    if len(calls) == 0:
        return launch, lane
    calls = calls[np.argsort(events.correlation[calls], kind="stable")]
    numbers = events.correlation[calls]
    wanted = events.correlation[rows]
    place = np.minimum(np.searchsorted(numbers, wanted), len(numbers) - 1)
    known = (numbers[place] == wanted) & (wanted > 0)
    launch[known] = events.start[calls[place[known]]]
    lane[known] = events.lane[calls[place[known]]]
    return launch, lane


def _cpu_work(trace: Trace) -> Work:
    events = trace.events
    spans = trace.rows_named(is_cpu_collective, Category.USER_ANNOTATION, Category.CPU_OP)
    operators = trace.rows_named(is_cpu_computation, Category.CPU_OP)
    operators = operators[~np.isin(events.lane[operators], _process_group_lanes(trace, spans))]
    rows = np.concatenate([spans, operators])
    is_span = np.arange(len(rows)) < len(spans)
    launch = events.start[rows].copy()
    lane = events.lane[rows].copy()
    launch[: len(spans)], lane[: len(spans)] = _issues(trace, spans)
    order = np.argsort(events.start[rows], kind="stable")
    rows, is_span, launch, lane = rows[order], is_span[order], launch[order], lane[order]
    start, end, stream = events.start[rows], events.ends(rows), np.full(len(rows), MISSING, np.int32)
    return Work(rows, start, end, launch, lane, stream, is_span, np.zeros(len(rows), np.bool_))


def _process_group_lanes(trace: Trace, spans: Int64) -> Int32:
    """Return the threads that only run collectives: their copies belong to the transfer."""
    events = trace.events
    steps = trace.rows_named(lambda name: name.startswith("ProfilerStep#"), Category.USER_ANNOTATION)
    main = np.unique(events.lane[steps])
    return np.setdiff1d(np.unique(events.lane[spans]), main).astype(np.int32)


def _issues(trace: Trace, spans: Int64) -> tuple[Int64, Int32]:
    """Return when (ns) and on which thread each span was issued to its process group.

    Spans and issues are matched by type, in order: a process group has several threads, and a span may begin
    before one that was issued earlier. Surplus spans are the first ones: they were issued before the trace
    began. A span that would begin before its issue keeps its own start.
    """
    events = trace.events
    issues = trace.by_start(trace.rows_named(is_issue, Category.CPU_OP))
    launch, lane = events.start[spans].copy(), events.lane[spans].copy()
    # Gloo implements reduce-scatter as an all-reduce: they are one type here.
    types = [collective_type(name) for name in trace.names]
    types = [CollectiveType.ALL_REDUCE if each is CollectiveType.REDUCE_SCATTER else each for each in types]
    numbers = np.array([COLLECTIVE_TYPES.index(each) for each in types], np.int64)
    of_span, of_issue = numbers[events.name[spans]], numbers[events.name[issues]]
    for number in np.unique(of_span).tolist():
        asked = np.flatnonzero(of_span == number)
        asked = asked[np.argsort(launch[asked], kind="stable")]
        given = issues[of_issue == number]
        surplus = max(len(asked) - len(given), 0)
        asked, given = asked[surplus:], given[: len(asked) - surplus]
        fits = events.start[given] <= launch[asked]
        launch[asked[fits]] = events.start[given[fits]]
        lane[asked[fits]] = events.lane[given[fits]]
    return launch, lane


def _collectives(trace: Trace, work: Work, spans: FsdpSpans, links: Links | None) -> Collectives:
    """Return the collectives with types and sizes.

    The name in the metadata takes precedence over the kernel's: RCCL names all kernels alike. A collective
    that implements one of FSDP's counts as that one: an all-to-all as a reduce-scatter, or one broadcast per
    rank, together, as one all-gather. On gloo the all-to-all of `impl` leaves out the rank's own part.
    """
    number = {kind: index for index, kind in enumerate(COLLECTIVE_TYPES)}
    by_name = [number[collective_type(name)] for name in trace.names]
    issued = _issued_types(trace, work)
    kind = np.zeros(len(work.row), np.int8)
    message = np.full(len(work.row), MISSING, np.int64)
    wire = np.full(len(work.row), MISSING, np.int64)
    roof = np.zeros(len(work.row), np.float64)
    leads = np.ones(len(work.row), np.bool_)
    gathering: set[int] = set()
    on_cpu = not len(trace.rows(Category.KERNEL))
    other = number[CollectiveType.OTHER]
    stand_ins = {number[each] for each in _STAND_INS}
    roofs: dict[tuple[str | None, int | None], float] = {}
    annotated = spans.index.innermost(work.launch_lane, work.launch).tolist()
    for i, row in enumerate(work.row.tolist()):
        info = trace.collectives.get(row)
        found = by_name[int(trace.events.name[row])]
        if issued[i] >= 0 and by_name[issued[i]] != other:
            found = by_name[issued[i]]
        if info is not None:
            described = number[collective_type(info.name)]
            if described != other and issued[i] < 0:
                found = described
        asked = found
        meant = spans.events[spans.event[annotated[i]]] if annotated[i] != NOTHING else ""
        if found in stand_ins and meant in _MEANT:
            found = number[CollectiveType(meant)]
        elif found == number[CollectiveType.BROADCAST] and meant == CollectiveType.ALL_GATHER:
            found = number[CollectiveType.ALL_GATHER]
            leads[i] = annotated[i] not in gathering
            gathering.add(annotated[i])
        if info is not None:
            types = COLLECTIVE_TYPES[asked], COLLECTIVE_TYPES[found]
            message[i], wire[i] = _sizes(info, *types, trace.world_size, on_cpu=on_cpu)
            if links is not None:
                group = (info.group_ranks, info.group_size)
                if group not in roofs:
                    roofs[group] = links.roof(group_ranks(info), info.group_size or trace.world_size) or 0.0
                roof[i] = roofs[group]
        kind[i] = found
    return Collectives(work, kind, message, wire, roof, leads)


def _sizes(
    info: CollectiveInfo,
    asked: CollectiveType,
    found: CollectiveType,
    world_size: int | None,
    *,
    on_cpu: bool,
) -> tuple[int, int]:
    """Return bytes of the message and on the wire. The backend ran type `asked`, which counts as `found`."""
    ranks = info.group_size or world_size
    size = message_bytes(asked if asked is CollectiveType.BROADCAST else found, info, world_size)
    if on_cpu and asked is CollectiveType.ALL_TO_ALL and found is CollectiveType.REDUCE_SCATTER:
        # The all-to-all sends all parts of the full buffer except the rank's own.
        size = None if size is None or not ranks or ranks < 2 else size * ranks // (ranks - 1)
    if size is None:
        return MISSING, MISSING
    sent = wire_bytes(found, size, ranks)
    return size, MISSING if sent is None else sent


def _issued_types(trace: Trace, work: Work) -> list[int]:
    """Return the name numbers of the issuing `c10d::` operators, MISSING where unknown.

    Gloo implements reduce-scatter as an all-reduce; only the operator shows which was called.
    """
    events = trace.events
    if len(trace.rows(Category.KERNEL)):
        return [MISSING] * len(work.row)
    operators = trace.rows_named(is_issue, Category.CPU_OP)
    by_place = {(int(events.start[row]), int(events.lane[row])): int(events.name[row]) for row in operators}
    places = zip(work.launch.tolist(), work.launch_lane.tolist(), strict=True)
    return [by_place.get(place, MISSING) for place in places]


# Wire bytes follow nccl-tests' "bus bandwidth" (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md): for n
# ranks and a full buffer of S bytes, all-gather, reduce-scatter and all-to-all send S (n-1)/n, all-reduce
# twice that, broadcast, reduce and send/recv S.

_MOST_BYTES = 1 << 45
"""Greatest size of a collective; a larger size in a trace is an error."""


def message_bytes(kind: CollectiveType, info: CollectiveInfo, world_size: int | None) -> int | None:
    """Return bytes of the full buffer (gathered, or before reduction); None if the trace does not say."""
    own, whole = info.in_elements or 0, info.out_elements or 0
    if kind is CollectiveType.ALL_GATHER:
        elements = whole or own * (info.group_size or world_size or 0)
    else:
        elements = max(own, whole)
    size = elements * (dtype_bytes(info.dtype) or 0)
    return size if 0 < size <= _MOST_BYTES else None


def wire_bytes(kind: CollectiveType, message: int, ranks: int | None) -> int | None:
    """Return the bytes that each rank sends; None when the number of ranks is unknown."""
    if kind in (CollectiveType.BROADCAST, CollectiveType.REDUCE, CollectiveType.SEND_RECV):
        return message
    if not ranks:
        return None
    times = 2 if kind is CollectiveType.ALL_REDUCE else 1
    return times * message * (ranks - 1) // ranks


# torch writes a group's ranks as text, `[0, 1, 2, 3]`, and shortens large groups: `[0, 8, 16, ..., 504]`.

MOST_RANKS = 1 << 16
"""Most ranks that are listed: a shortened list of few characters may mean any number."""


def group_ranks(info: CollectiveInfo) -> tuple[int, ...] | None:
    """Return the ranks of the group; None if the trace does not list all of them.

    A shortened list is completed if it is evenly spaced and then has as many ranks as the group.
    """
    return _listed(info.group_ranks or "", info.group_size)


@lru_cache(maxsize=16)
def _listed(text: str, size: int | None) -> tuple[int, ...] | None:
    words = text.strip().strip("[]").replace(" ", "").split(",")
    numbers = [int(word) for word in words if word.isdecimal() and len(word) < 10]
    if "..." not in words:
        return tuple(numbers) if len(numbers) == len(words) <= MOST_RANKS else None
    if len(numbers) < 3 or len(numbers) != len(words) - 1 or numbers[1] <= numbers[0]:
        return None
    completed = range(numbers[0], numbers[-1] + 1, numbers[1] - numbers[0])
    if len(completed) != size or size > MOST_RANKS or not all(number in completed for number in numbers):
        return None
    return tuple(completed)


def group_key(info: CollectiveInfo | None) -> str:
    """Return a text that is equal on all ranks of one group, as far as the trace says; "" if unknown."""
    if info is None:
        return ""
    ranks = group_ranks(info)
    if ranks is not None:
        return f"ranks {','.join(map(str, ranks))}"
    return f"group {info.group_name}" if info.group_name else ""
