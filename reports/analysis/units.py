"""FSDP units: the unit of a collective, from the annotation around the call that launched it.

`impl` writes `FSDP::<event> (<unit>)`, torch's FSDP2 `FSDP::all_gather (layers.0)` and, for prefetches,
`FSDP::backward_prefetch for layers.0`; the innermost annotation around the launch decides. torch's FSDP1
names no units, so they are numbered by their order (`number_units`)."""

import re
from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from fsdpbench.reports.analysis import intervals
from fsdpbench.reports.analysis.intervals import Intervals
from fsdpbench.reports.analysis.naming import PATTERNS
from fsdpbench.reports.readers import MISSING, Category, Trace
from fsdpbench.reports.readers.trace import Bool, Int32, Int64

_EVENT = re.compile(
    r"^FSDP::(?P<event>\w+?)(?:\s*+\((?P<unit>[^()]*+)\)|\s++for\s++(?P<target>\S(?:.*\S)?))?\s*+$"
)

_OF_NO_UNIT = ("inputs_to_device", "cast_forward_inputs", "cast_forward_outputs")
"""Annotations of torch that never name their unit."""

ROOT_UNIT = "root"
LIMITER_WAIT = "limiter_wait"
"""The event in which the CPU waits for FSDP's rate limiter."""

NUMBERED_UNITS = "FSDP1 of torch names no units: they are numbered in the order of their forward"


@dataclass(frozen=True, eq=False)
class FsdpSpans:
    """All FSDP annotations of a trace, by start.

    event, unit: index into `events` and `units`.  parent_of: row of the annotation around each, or NOTHING.
    numbered: the trace names no units, so they are numbered in the order of their forward.
    """

    start: Int64
    end: Int64
    lane: Int32
    event: Int32
    unit: Int32
    events: tuple[str, ...]
    units: tuple[str, ...]
    index: "SpanIndex"
    parent_of: Int64
    numbered: bool = False

    def __len__(self) -> int:
        return len(self.start)

    def named(self, *events: str) -> Bool:
        """Return a mask of the annotations of these events."""
        return np.isin(self.event, [number for number, name in enumerate(self.events) if name in events])

    def times(self, event: str) -> Intervals:
        """Return when the CPU was in annotations of `event`."""
        rows = self.named(event)
        return intervals.of(self.start[rows], self.end[rows])


def parse_annotation(name: str) -> tuple[str, str] | None:
    """Return (event, unit) of an FSDP annotation's name, None for other names; no unit means the root."""
    found = _EVENT.match(name) if name.startswith("FSDP::") else None
    if not found or found["event"] in _OF_NO_UNIT:
        return None
    return found["event"], (found["unit"] or found["target"] or "").strip() or ROOT_UNIT


def fsdp_spans(trace: Trace) -> FsdpSpans:
    """Return the trace's annotations; units are in order of first appearance."""
    parsed = trace.parsed_annotations(parse_annotation)
    named = [Annotation(start, end, lane, *words) for words, start, end, lane in parsed]
    found = named or number_units(trace)
    events = {name: number for number, name in enumerate(dict.fromkeys(each.event for each in found))}
    units = {name: number for number, name in enumerate(dict.fromkeys(each.unit for each in found))}
    rows = [(each.start, each.end, each.lane, events[each.event], units[each.unit]) for each in found]
    columns = np.array(rows, np.int64).reshape(-1, 5)
    start, end = columns[:, 0], columns[:, 1]
    lane, event, unit = (columns[:, place].astype(np.int32) for place in (2, 3, 4))
    rank = np.array([_rank(name) for name in events], np.int32)[event]
    index = index_spans(lane, start, end, rank)
    names, numbered = (tuple(events), tuple(units)), bool(found) and not named
    return FsdpSpans(start, end, lane, event, unit, *names, index, index.parents_by_row(), numbered)


def _rank(event: str) -> int:
    """Return the nesting order of events with equal times: hooks enclose prefetches, and these the rest."""
    if event.startswith("root_"):
        return 0
    if event.startswith(("pre_", "post_")):
        return 1
    return 2 if event.endswith("_prefetch") else 3


def unit_of(spans: FsdpSpans, lane: Int32, time: Int64) -> Int32:
    """Return for each launch (lane, ns) the index into `spans.units`, MISSING if none encloses it."""
    found = spans.index.innermost(lane, time)
    unit = np.full(len(time), MISSING, np.int32)
    known = found != NOTHING
    unit[known] = spans.unit[found[known]]
    return unit


# Spans of one thread nest, like calls; so the innermost span around a point is the last one to begin before
# it, or one of that span's ancestors:
#     |--------- a ----------|
#        |-- b --|   |- c -|
#              ^ b      ^ c  ^ a        (after c: the last to begin is c, but it has ended; its parent is a)

NOTHING = -1


@dataclass(frozen=True, eq=False)
class SpanIndex:
    """Spans sorted by lane, start and (longest first) end; `row`: each span's row in the input."""

    lane: Int64
    start: Int64
    end: Int64
    parent: Int64
    row: Int64

    def innermost(self, lane: Int32 | Int64, time: Int64) -> Int64:
        """Return the input row of the innermost span [start, end] around each (lane, ns), or NOTHING."""
        found = np.full(len(time), NOTHING, np.int64)
        for each in np.unique(self.lane):
            low, high = np.searchsorted(self.lane, [each, each + 1])
            points = np.flatnonzero(lane == each)
            if len(points) == 0:
                continue
            at = time[points]
            span = low + np.searchsorted(self.start[low:high], at, side="right") - 1
            span[span < low] = NOTHING
            # Climb until the span reaches the time; nesting is a few levels deep.
            while True:
                ended = (span != NOTHING) & (self.end[span] < at)
                if not ended.any():
                    break
                span[ended] = self.parent[span[ended]]
            found[points] = np.where(span == NOTHING, NOTHING, self.row[span])
        return found

    def parents_by_row(self) -> Int64:
        """Return for each input row the input row of the span around it, or NOTHING."""
        parents = np.full(len(self.row), NOTHING, np.int64)
        known = self.parent != NOTHING
        parents[self.row[known]] = self.row[self.parent[known]]
        return parents


def index_spans(
    lane: Int32 | Int64, start: Int64, end: Int64, rank: Int32 | Int64 | None = None
) -> SpanIndex:
    """Sort the spans and find the parent of each: the innermost earlier one that has not ended.

    Of spans that begin and end together, the one of lower `rank` is outside; without ranks, the earlier row.
    """
    order = np.lexsort((-end, start, lane) if rank is None else (rank, -end, start, lane))
    parent = np.full(len(order), NOTHING, np.int64)
    lane, start, end = lane[order].astype(np.int64), start[order], end[order]
    if ((lane[1:] == lane[:-1]) & (start[1:] <= end[:-1])).any():
        lane_list, end_list = lane.tolist(), end.tolist()
        stack: list[int] = []
        for i, (this_lane, begin) in enumerate(zip(lane_list, start.tolist(), strict=True)):
            while stack and (lane_list[stack[-1]] != this_lane or end_list[stack[-1]] < begin):
                stack.pop()
            if stack:
                parent[i] = stack[-1]
            stack.append(i)
    return SpanIndex(lane, start, end, parent, order.astype(np.int64))


# Units of torch's FSDP1, whose annotations do not name them: the order of the hooks identifies them.
#
#     forward (root) > _pre_forward _post_forward of each unit, in order          unit.0 unit.1 ... unit.n
#     _pre_backward_hook, in the reverse order of the units' _post_forward        root unit.n ... unit.0
#     _post_backward_hook, in the reverse order of the units' _pre_forward        unit.n ... unit.0 root
#
# One such round is one forward and backward of the model.  A prefetch is for the unit whose turn is next.
# The annotations get the names of FSDP2's events, so that the rest of the analysis handles both alike.
# Backward stays unnamed if its number of hooks differs from the number of units in forward (frozen units,
# several losses).

_PREFIX = "FullyShardedDataParallel."
_FORWARD = "forward"
_NAMES = PATTERNS["fsdp1"]
_HOOKS = ("forward", "_pre_forward", "_post_forward", "_pre_backward_hook", "_post_backward_hook")
_INSIDE = ("_pre_forward_prefetch", "_pre_backward_prefetch", "_post_backward_prefetch", "rate_limiter")
_GATHERING = ("pre_forward", "pre_backward")
WAIT = "wait_all_gather"


@dataclass(frozen=True)
class Annotation:
    """An FSDP event on the CPU, [start, end] in ns on a thread (row of `Trace.lanes`), and its unit."""

    start: int
    end: int
    lane: int
    event: str
    unit: str = ""

    def encloses(self, other: "Annotation") -> bool:
        return self.lane == other.lane and self.start <= other.start and other.end <= self.end


def number_units(trace: Trace) -> list[Annotation]:
    """Return all annotations whose unit was found, by start."""
    found = [each for spans in _rounds(_spans(trace)) for each in _name_round(spans)]
    return sorted(found, key=lambda each: (each.start, -each.end))


def _spans(trace: Trace) -> list[Annotation]:
    events = trace.events
    rows = trace.rows_named(lambda name: name.startswith(_PREFIX), Category.USER_ANNOTATION)
    rows = rows[np.lexsort((-events.ends(rows), events.start[rows]))]
    columns = (events.start[rows], events.ends(rows), events.lane[rows], events.name[rows])
    return [
        Annotation(start, end, lane, trace.names[name].removeprefix(_PREFIX))
        for start, end, lane, name in zip(*(column.tolist() for column in columns), strict=True)
    ]


def _rounds(spans: list[Annotation]) -> list[list[Annotation]]:
    """Return the spans by round; each forward of the outermost unit begins a round.

    A checkpointed unit runs its forward again in backward; such a forward encloses no other unit's forward,
    unlike the outermost one (unless the model is one unit).
    """
    forwards = [span for span in spans if span.event == _FORWARD]
    outermost: list[Annotation] = []
    enclosing: set[int] = set()
    for span in forwards:
        if outermost and outermost[-1].encloses(span):
            enclosing.add(len(outermost) - 1)
        else:
            outermost.append(span)
    starts = [span.start for place, span in enumerate(outermost) if not enclosing or place in enclosing]
    edges = [*starts, max((span.end for span in spans), default=0) + 1]
    places = [bisect_left(spans, edge, key=lambda span: span.start) for edge in edges]
    return [spans[low:high] for low, high in pairwise(places)]


def _name_round(spans: list[Annotation]) -> list[Annotation]:
    outermost = next(span for span in spans if span.event == _FORWARD)
    first, later = (
        {name: [s for s in spans if s.event == name and outermost.encloses(s) is inside] for name in _HOOKS}
        for inside in (True, False)
    )
    forwards = first[_FORWARD]
    names = [ROOT_UNIT, *(f"unit.{number}" for number in range(len(forwards) - 1))]
    by_end = [names[place] for place in sorted(range(len(forwards)), key=lambda place: forwards[place].end)]
    backwards = by_end[::-1]
    inner = [span for span in spans if span.event in _INSIDE]
    found: list[Annotation] = []
    for hooks, order in (
        (first["_pre_forward"], names),
        (first["_post_forward"], by_end),
        (later["_pre_forward"], backwards[1:]),  # Recomputed by checkpointing.
        (later["_post_forward"], backwards[1:]),
        (later["_pre_backward_hook"], backwards),
        (later["_post_backward_hook"], names[::-1]),
    ):
        if len(hooks) == len(order):
            for place, hook in enumerate(hooks):
                found += _of_turn(hook, order, place, inner)
    return found


def _of_turn(hook: Annotation, order: list[str], place: int, inner: list[Annotation]) -> list[Annotation]:
    """Return one hook's annotations: itself, spans inside it, and at its end the wait for its all-gather."""
    event, unit = _NAMES[hook.event], order[place]
    found = [Annotation(hook.start, hook.end, hook.lane, event, unit)]
    following = order[place + 1] if place + 1 < len(order) else unit
    prefetches = [span for span in inner if span.event != "rate_limiter" and hook.encloses(span)]
    found += [Annotation(s.start, s.end, s.lane, _NAMES[s.event], following) for s in prefetches]
    for span in inner:
        if span.event == "rate_limiter" and hook.encloses(span):
            ahead = any(prefetch.encloses(span) for prefetch in prefetches)
            target = following if ahead else unit
            found.append(Annotation(span.start, span.end, span.lane, _NAMES[span.event], target))
    if event in _GATHERING:
        # FSDP1 marks no wait; its streams wait for each other when the hook ends.
        found.append(Annotation(hook.end, hook.end, hook.lane, WAIT, unit))
    return found


# Computation belongs to the unit whose forward or backward was running on the CPU when it was launched.
# A unit's forward runs between its `pre_forward` and its `post_forward`, its backward between `pre_backward`
# and `post_backward`:
#
#     pre_forward (root)  pre_forward (b.0)  kernels  post_forward (b.0)  kernels  post_forward (root)
#                         |------------- b.0 ---------------------------|
#     |---------------------------------- root ------------------------------------------------------|

_OPENS = {"pre_forward": "forward", "pre_backward": "backward"}
_CLOSES = {
    "post_forward": "forward",
    "post_backward": "backward",
    # torch's FSDP2 writes no post_backward; it reshards when the unit's gradients are computed.
    "post_backward_reshard": "backward",
}


def running_index(spans: FsdpSpans) -> tuple[SpanIndex, Int32]:
    """Return an index of the periods in which a unit's own code runs on the CPU, and the unit of each."""
    found: list[tuple[int, int, int, int]] = []
    open_at: dict[tuple[str, int], tuple[int, int]] = {}
    columns = (spans.event, spans.unit, spans.lane, spans.start, spans.end)
    for event, unit, lane, start, end in zip(*(each.tolist() for each in columns), strict=True):
        name = spans.events[event]
        if name in _OPENS:
            # The first opening counts: a unit with several outputs may announce its backward more than once.
            open_at.setdefault((_OPENS[name], unit), (lane, start))
        elif name in _CLOSES and (_CLOSES[name], unit) in open_at:
            opened_lane, opened = open_at.pop((_CLOSES[name], unit))
            if opened_lane == lane:
                found.append((lane, opened, end, unit))
    table = np.array(found, np.int64).reshape(-1, 4)
    return index_spans(*table[:, :3].T), table[:, 3].astype(np.int32)


def unit_of_work(spans: FsdpSpans, lane: Int32, launch: Int64) -> Int32:
    """Return for each event launched at (lane, ns) the index into `spans.units`, or MISSING.

    A collective belongs to the unit of the annotation around its launch, computation to the unit whose
    forward or backward was running then.
    """
    unit = unit_of(spans, lane, launch)
    index, running = running_index(spans)
    place = index.innermost(lane, launch)
    use = (unit == MISSING) & (place != NOTHING)
    unit[use] = running[place[use]]
    return unit
