"""The timeline of one step, packed for the page's canvas (`timeline.js` has the reader).

Events are indices into tables of names and units; each start is relative to the previous start. An event
takes about 25 bytes, so that two hundred steps of nine hundred events fit in five megabytes::

    {"duration": ns, "names": [...], "units": [...],
     "rows": [{"label": "compute · stream 7", "lanes": 1,
               "s": [0, 5210, 3100], "d": [5000, 3000, 900], "n": [4, 4, 7], "u": [0, 0, -1],
               "c": "000", "l": "000"}]}

A step of a large model has ten thousand kernels; a page needs some hundred bars. Above a limit, neighbors of
the same category and FSDP unit with small gaps between them are joined, smallest gaps first, so that long
events and long gaps stay as they are.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from fsdpbench.reports.analysis.activity import Activity, Work, find_activity
from fsdpbench.reports.analysis.model import StepAnalysis
from fsdpbench.reports.analysis.naming import collective_type
from fsdpbench.reports.analysis.units import FsdpSpans, fsdp_spans, unit_of_work
from fsdpbench.reports.analysis.windows import phase_marks
from fsdpbench.reports.readers import MISSING, Trace
from fsdpbench.reports.readers.trace import Int32

# In the order of KINDS in timeline.js.
KINDS = (
    "compute", "all_gather", "reduce_scatter", "all_reduce", "communication", "memory", "phase", "event",
    "wait",
)  # fmt: skip
MOST_ROWS = 16
_KIND_OF_CATEGORY = {"computation": "compute", "copy": "memory", "phase": "phase", "fsdp": "event"}

_COPIES = re.compile(r"memcpy|split_with_sizes_copy|chunk_cat|Copy|copy_kernel|CatArray", re.IGNORECASE)
"""Kernels that only move data, such as those that copy in or out of collectives."""

# In these FSDP events the CPU itself waits; in all others it only issues work.
_CPU_WAITS = frozenset({"limiter_wait"})


@dataclass(frozen=True)
class Bar:
    """A bar. start: ns after the step's start; duration: ns; count: number of events joined into it."""

    start: int
    duration: int
    name: str
    category: str
    unit: str | None
    count: int = 1


@dataclass(frozen=True)
class Row:
    """One line of the drawing. kind: "stream" (device), "thread" (CPU operators and collectives of a CPU
    trace), "annotation" (FSDP and phase annotations of a thread)."""

    label: str
    kind: str
    bars: tuple[Bar, ...]


def stream_rows(trace: Trace, step: StepAnalysis, *, max_bars: int = 600) -> list[Row]:
    """Return the rows of one step: streams first, then the CPU's annotations.

    Bars have the categories "computation", "communication", "copy", "phase" and "fsdp". Bars that extend
    beyond the step's window are cut at its edges.
    """
    spans = fsdp_spans(trace)
    activity = find_activity(trace, spans)
    rows = _work_rows(trace, activity, spans, step.start, step.end, max_bars)
    return rows + _annotation_rows(trace, spans, step.start, step.end, max_bars)


def _work_rows(
    trace: Trace, activity: Activity, spans: FsdpSpans, start: int, end: int, max_bars: int
) -> list[Row]:
    work = activity.work
    inside = (work.start < end) & (work.end > start)
    work = work.select(inside)
    unit = unit_of_work(spans, work.launch_lane, work.launch)
    on_device = activity.kind == "gpu"
    column = trace.events.stream if on_device else trace.events.lane
    place = column[work.row]
    rows: list[tuple[int, Row]] = []
    for each in np.unique(place).tolist():
        mask = place == each
        bars = _bars(trace, work.select(mask), unit[mask], spans, start, end)
        if not on_device:
            bars = _outermost(bars)
        busy = {
            category: sum(bar.duration for bar in bars if bar.category == category) for category in _ORDER
        }
        mainly = max(_ORDER, key=lambda category: busy[category])
        label = f"stream {each} ({mainly})" if on_device else f"thread {trace.lanes[each][1]} ({mainly})"
        row = Row(label, "stream" if on_device else "thread", tuple(_thin(bars, max_bars)))
        rows.append((_ORDER.index(mainly), row))
    return [row for _, row in sorted(rows, key=lambda pair: pair[0])]


_ORDER = ("computation", "communication", "copy")


def _bars(trace: Trace, work: Work, unit: Int32, spans: FsdpSpans, start: int, end: int) -> list[Bar]:
    low = np.maximum(work.start, start) - start
    high = np.minimum(work.end, end) - start
    category = np.where(work.is_communication, 1, np.where(work.is_copy, 2, 0))
    columns = (low, high - low, work.row, category, unit)
    names = {MISSING: None, **dict(enumerate(spans.units))}
    return [
        Bar(begin, duration, trace.name_of(row), _ORDER[kind], names[number])
        for begin, duration, row, kind, number in zip(*(each.tolist() for each in columns), strict=True)
    ]


def _outermost(bars: Sequence[Bar]) -> list[Bar]:
    """Return only the outermost operators: operators call operators."""
    kept: list[Bar] = []
    for bar in sorted(bars, key=lambda bar: (bar.start, -bar.duration)):
        if not kept or bar.start >= kept[-1].start + kept[-1].duration:
            kept.append(bar)
    return kept


def _thin(bars: Sequence[Bar], most: int) -> list[Bar]:
    """Return at most `most` bars: bars shorter than a resolution are joined over gaps shorter than it.

    The resolution doubles until few enough are left, so long bars and long gaps stay. Bars of different units
    or categories are joined only if that is not enough.
    """
    if len(bars) <= most:
        return list(bars)
    start = np.fromiter((bar.start for bar in bars), np.int64, len(bars))
    length = np.fromiter((bar.duration for bar in bars), np.int64, len(bars))
    gap = start[1:] - (start + length)[:-1]
    alike = np.fromiter((a.category == b.category and a.unit == b.unit for a, b in pairwise(bars)), np.bool_)
    span = max(int((start + length).max() - start.min()), 1)
    for may_join, coarsest in ((alike, span // 8), (np.ones_like(alike), 4 * span)):
        resolution = max(span // (8 * most), 1)
        while resolution <= coarsest:
            short = length < resolution
            joined = short[1:] & short[:-1] & (gap < resolution) & may_join
            if len(bars) - int(joined.sum()) <= most:
                first = np.flatnonzero(np.concatenate([[True], ~joined])).tolist()
                return [_join(bars[low:high]) for low, high in pairwise([*first, len(bars)])]
            resolution *= 2
    return [_join(bars)]


def _join(bars: Sequence[Bar]) -> Bar:
    if len(bars) == 1:
        return bars[0]
    longest = max(bars, key=lambda bar: bar.duration)
    start = bars[0].start
    end = max(bar.start + bar.duration for bar in bars)
    count = sum(bar.count for bar in bars)
    return Bar(start, end - start, longest.name, longest.category, longest.unit, count)


def _annotation_rows(trace: Trace, spans: FsdpSpans, start: int, end: int, max_bars: int) -> list[Row]:
    """Return the phases, and for each thread its FSDP annotations (nested ones follow their parents)."""

    def bar(begin: int, until: int, name: str, category: str, unit: str | None) -> Bar:
        """Return a bar from `begin` to `until`, cut at both ends of the drawing."""
        low = max(begin, start)
        return Bar(low - start, min(until, end) - low, name, category, unit)

    rows: list[Row] = []
    marks = [mark for mark in phase_marks(trace) if mark.start < end and mark.end > start]
    if marks:
        phases = tuple(bar(mark.start, mark.end, mark.name, "phase", None) for mark in marks)
        rows.append(Row("CPU phases", "annotation", phases))
    inside = (spans.start < end) & (spans.end > start)
    for lane in np.unique(spans.lane[inside]).tolist():
        numbers = np.flatnonzero(inside & (spans.lane == lane)).tolist()
        bars = [
            bar(begin, until, spans.events[spans.event[i]], "fsdp", spans.units[spans.unit[i]])
            for i in numbers
            for begin, until in [(int(spans.start[i]), int(spans.end[i]))]
        ]
        label = f"CPU thread {trace.lanes[lane][1]}: FSDP"
        rows.append(Row(label, "annotation", tuple(_thin(bars, max_bars))))
    return rows


def pack_timeline(trace: Trace, step: StepAnalysis, most_events: int) -> dict[str, object] | None:
    """Return the step's rows with at most about `most_events` events; None if nothing ran in it."""
    drawn = [row for row in stream_rows(trace, step, max_bars=max(60, most_events // 3)) if row.bars]
    if not drawn:
        return None
    rows = _busiest(drawn)
    names: _Places = {}
    units: _Places = {}
    packed = [_pack_row(row, names, units) for row in rows]
    joined = sum(bar.count - 1 for row in rows for bar in row.bars)
    return {
        "duration": step.duration,
        "names": list(names),
        "units": list(units),
        "rows": packed,
        "note": _note(joined, len(drawn) - len(rows)),
    }


def _busiest(rows: Sequence[Row]) -> list[Row]:
    """Return all of the CPU's annotations, and the busiest streams and threads that fit on a screen."""
    work = [row for row in rows if row.kind != "annotation"]
    busiest = sorted(work, key=lambda row: -sum(bar.duration for bar in row.bars))[:MOST_ROWS]
    kept = {id(row) for row in busiest}
    return [row for row in rows if row.kind == "annotation" or id(row) in kept]


def _note(joined: int, left_out: int) -> str:
    sentences = []
    if joined:
        sentences.append(
            f"{joined:,} short events are drawn together with their neighbours; the trace has each."
        )
    if left_out:
        sentences.append(f"{left_out} streams or threads with less work are left out.")
    return " ".join(sentences)


_Places = dict[str, int]
"""Texts in order of first use, with their indices."""


def _pack_row(row: Row, names: _Places, units: _Places) -> dict[str, object]:
    bars = sorted(row.bars, key=lambda bar: (bar.start, -bar.duration))
    starts = [bar.start for bar in bars]
    # A stream runs one kernel after another; only annotations and operators nest.
    lanes = [0] * len(bars) if row.kind == "stream" else _lanes(bars)
    return {
        "label": _label(row),
        "lanes": max(lanes, default=0) + 1,
        "s": [now - before for before, now in zip([0, *starts], starts, strict=False)],
        "d": [bar.duration for bar in bars],
        "n": [names.setdefault(_words(bar), len(names)) for bar in bars],
        "u": [-1 if bar.unit is None else units.setdefault(bar.unit[:120], len(units)) for bar in bars],
        "c": "".join(str(KINDS.index(_kind(bar))) for bar in bars),
        "l": "".join(map(str, lanes)),
    }


def _label(row: Row) -> str:
    """Return the row's label; a stream or thread is named after the kind of work that takes most of it."""
    if row.kind == "annotation":
        return row.label[:80]
    busy: Counter[str] = Counter()
    for bar in row.bars:
        busy["copies" if _COPIES.search(bar.name) else _kind(bar)] += bar.duration
    return f"{busy.most_common(1)[0][0].replace('_', '-')} · {row.label.partition(' (')[0]}"


def _lanes(bars: Sequence[Bar], most: int = 4) -> list[int]:
    """Return the nesting depth of each bar (by start); bars deeper than `most` share a lane."""
    ends: list[int] = []
    lanes = []
    for bar in bars:
        while ends and ends[-1] <= bar.start:
            ends.pop()
        lanes.append(min(len(ends), most - 1))
        ends.append(bar.start + bar.duration)
    return lanes


def _kind(bar: Bar) -> str:
    if bar.category == "communication":
        found = collective_type(bar.name).value
        return found if found in KINDS else "communication"
    if bar.category == "fsdp" and bar.name in _CPU_WAITS:
        return "wait"
    return _KIND_OF_CATEGORY.get(bar.category, "event")


def _words(bar: Bar) -> str:
    """Return the event's name, cut to fit into a tooltip."""
    name = bar.name if len(bar.name) <= 120 else f"{bar.name[:119]}…"
    return name if bar.count == 1 else f"{name} and {bar.count - 1} more"
