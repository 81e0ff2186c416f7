"""FSDP units: which unit a collective belongs to, by the annotation around the call that launched it.

`impl` writes `FSDP::<event> (<unit>)`, torch's FSDP2 `FSDP::all_gather (layers.0)` and the like, its prefetch
`FSDP::backward_prefetch for layers.0`; the innermost annotation around the launch decides. torch's FSDP1
names no unit: its units are numbered by their order (`fsdp1_units`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from fsdpbench.reports.analysis.device.fsdp1_units import Annotation, number_units
from fsdpbench.reports.trace import MISSING, Category, Trace
from fsdpbench.reports.trace.model import Int32, Int64

_EVENT = re.compile(
    r"^FSDP::(?P<event>\w+?)(?:\s*+\((?P<unit>[^()]*+)\)|\s++for\s++(?P<target>\S(?:.*\S)?))?\s*+$"
)

_OF_NO_UNIT = ("inputs_to_device", "cast_forward_inputs", "cast_forward_outputs")
"""torch's annotations that never name their unit, whichever it is."""

ROOT_UNIT = "root"

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
    index: SpanIndex
    parent_of: Int64
    numbered: bool = False

    def __len__(self) -> int:
        return len(self.start)


def parse_annotation(name: str) -> tuple[str, str] | None:
    """(event, unit) of an FSDP annotation's name, None for other names; a unit without name is the root."""
    found = _EVENT.match(name)
    if not found or found["event"] in _OF_NO_UNIT:
        return None
    return found["event"], (found["unit"] or found["target"] or "").strip() or ROOT_UNIT


def fsdp_spans(trace: Trace) -> FsdpSpans:
    """The annotations; units are in the order in which they first appear."""
    named = _named_annotations(trace)
    annotations = named or number_units(trace, ROOT_UNIT)
    events: dict[str, int] = {}
    units: dict[str, int] = {}
    columns = np.array(
        [
            (
                each.start,
                each.end,
                each.lane,
                events.setdefault(each.event, len(events)),
                units.setdefault(each.unit, len(units)),
            )
            for each in annotations
        ],
        np.int64,
    ).reshape(-1, 5)
    start, end = columns[:, 0], columns[:, 1]
    lane, event, unit = (columns[:, place].astype(np.int32) for place in (2, 3, 4))
    rank = np.array([_rank(name) for name in events], np.int32)[event]
    index = index_spans(lane, start, end, rank)
    return FsdpSpans(
        start,
        end,
        lane,
        event,
        unit,
        tuple(events),
        tuple(units),
        index,
        index.parents_by_row(),
        numbered=bool(annotations) and not named,
    )


def _rank(event: str) -> int:
    """Hooks call prefetches, and those the rest: which of two is outside where their times are the same."""
    if event.startswith("root_"):
        return 0
    if event.startswith(("pre_", "post_")):
        return 1
    return 2 if event.endswith("_prefetch") else 3


def _named_annotations(trace: Trace) -> list[Annotation]:
    """Those that name their unit, by start; each name is parsed once."""
    parsed = {
        number: found
        for number, name in enumerate(trace.names)
        if name.startswith("FSDP::") and (found := parse_annotation(name))
    }
    events = trace.events
    rows = trace.rows(Category.USER_ANNOTATION)
    rows = rows[np.isin(events.name[rows], np.fromiter(parsed, np.int64, len(parsed)))]
    rows = rows[np.argsort(events.start[rows], kind="stable")]
    columns = (events.start[rows], events.end[rows], events.lane[rows], events.name[rows])
    return [
        Annotation(start, end, lane, *parsed[name])
        for start, end, lane, name in zip(*(column.tolist() for column in columns), strict=True)
    ]


def unit_of(spans: FsdpSpans, lane: Int32, time: Int64) -> Int32:
    """For each launch (lane, time): index into `spans.units`, MISSING where no annotation encloses it."""
    found = spans.index.innermost(lane, time)
    unit = np.full(len(time), MISSING, np.int32)
    known = found != NOTHING
    unit[known] = spans.unit[found[known]]
    return unit


# Which of a set of nested spans encloses a point in time, on which thread.
# Spans of one thread nest, as calls do; so the innermost span around a point is the last one to begin before
# it, or one of that span's ancestors:
#     |--------- a ----------|
#        |-- b --|   |- c -|
#              ^ b      ^ c  ^ a        (after c: the last to begin is c, which has ended; its parent a holds)

NOTHING = -1


@dataclass(frozen=True, eq=False)
class SpanIndex:
    """Spans sorted by lane, start and (longest first) end; `row` says which row of the input each was."""

    lane: Int64
    start: Int64
    end: Int64
    parent: Int64
    row: Int64

    def innermost(self, lane: Int32 | Int64, time: Int64) -> Int64:
        """The input row of the innermost span [start, end] around each point (lane, time), or NOTHING."""
        found = np.full(len(time), NOTHING, np.int64)
        for each in np.unique(self.lane):
            low, high = np.searchsorted(self.lane, [each, each + 1])
            points = np.flatnonzero(lane == each)
            if len(points) == 0:
                continue
            at = time[points]
            span = low + np.searchsorted(self.start[low:high], at, side="right") - 1
            span[span < low] = NOTHING
            # Climb until the span reaches far enough; nesting is a few levels deep.
            while True:
                ended = (span != NOTHING) & (self.end[span] < at)
                if not ended.any():
                    break
                span[ended] = self.parent[span[ended]]
            found[points] = np.where(span == NOTHING, NOTHING, self.row[span])
        return found

    def parents_by_row(self) -> Int64:
        """For each input row: the input row of the span around it, or NOTHING."""
        parents = np.full(len(self.row), NOTHING, np.int64)
        known = self.parent != NOTHING
        parents[self.row[known]] = self.row[self.parent[known]]
        return parents


def index_spans(
    lane: Int32 | Int64, start: Int64, end: Int64, rank: Int32 | Int64 | None = None
) -> SpanIndex:
    """Sorts the spans and finds each one's parent: the innermost earlier one that has not ended.

    Of spans that begin and end together the one of lower `rank` is outside; without ranks the earlier row.
    """
    order = np.lexsort((-end, start, lane) if rank is None else (rank, -end, start, lane))
    lane_list, start_list, end_list = lane[order].tolist(), start[order].tolist(), end[order].tolist()
    parent = np.full(len(order), NOTHING, np.int64)
    stack: list[int] = []
    for i, (this_lane, begin) in enumerate(zip(lane_list, start_list, strict=True)):
        while stack and (lane_list[stack[-1]] != this_lane or end_list[stack[-1]] < begin):
            stack.pop()
        if stack:
            parent[i] = stack[-1]
        stack.append(i)
    return SpanIndex(lane[order].astype(np.int64), start[order], end[order], parent, order.astype(np.int64))
