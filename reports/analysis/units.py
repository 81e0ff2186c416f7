"""FSDP units: which unit a collective belongs to, by the annotation around the call that launched it.

`impl` writes `FSDP::<event> (<unit>)`, torch's FSDP2 `FSDP::all_gather (layers.0)` and the like, its prefetch
`FSDP::backward_prefetch for layers.0`; the innermost annotation around the launch decides.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from reports.analysis.nesting import NOTHING, SpanIndex, index_spans
from reports.trace import MISSING, Category, Trace
from reports.trace.model import Int32, Int64

_EVENT = re.compile(r"^FSDP::(?P<event>\w+?)(?:\s*\((?P<unit>[^()]*)\)|\s+for\s+(?P<target>.+))?\s*$")

_OF_NO_UNIT = ("inputs_to_device", "cast_forward_inputs", "cast_forward_outputs")
"""torch's annotations that never name their unit, whichever it is."""

ROOT_UNIT = "root"


@dataclass(frozen=True, eq=False)
class FsdpSpans:
    """All FSDP annotations of a trace, by start.

    event, unit: index into `events` and `units`.  parent_of: row of the annotation around each, or NOTHING.
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

    def __len__(self) -> int:
        return len(self.start)


def parse_annotation(name: str) -> tuple[str, str] | None:
    """(event, unit) of an FSDP annotation's name, None for other names; a unit without name is the root."""
    found = _EVENT.match(name)
    if not found or found["event"] in _OF_NO_UNIT:
        return None
    return found["event"], (found["unit"] or found["target"] or "").strip() or ROOT_UNIT


def fsdp_spans(trace: Trace) -> FsdpSpans:
    """The annotations, parsed once a name; units are in the order in which they first appear."""
    parsed = {
        number: found
        for number, name in enumerate(trace.names)
        if name.startswith("FSDP::") and (found := parse_annotation(name))
    }
    rows = trace.rows(Category.USER_ANNOTATION)
    rows = rows[np.isin(trace.events.name[rows], np.fromiter(parsed, np.int64, len(parsed)))]
    rows = rows[np.argsort(trace.events.start[rows], kind="stable")]
    events: dict[str, int] = {}
    units: dict[str, int] = {}
    event_column, unit_column = [], []
    for name in trace.events.name[rows].tolist():
        event, unit = parsed[name]
        event_column.append(events.setdefault(event, len(events)))
        unit_column.append(units.setdefault(unit, len(units)))
    start, end, lane = trace.events.start[rows], trace.events.end[rows], trace.events.lane[rows]
    index = index_spans(lane, start, end)
    return FsdpSpans(
        start,
        end,
        lane,
        np.array(event_column, np.int32),
        np.array(unit_column, np.int32),
        tuple(events),
        tuple(units),
        index,
        index.parents_by_row(),
    )


def unit_of(spans: FsdpSpans, lane: Int32, time: Int64) -> Int32:
    """For each launch (lane, time): index into `spans.units`, MISSING where no annotation encloses it."""
    found = spans.index.innermost(lane, time)
    unit = np.full(len(time), MISSING, np.int32)
    known = found != NOTHING
    unit[known] = spans.unit[found[known]]
    return unit
