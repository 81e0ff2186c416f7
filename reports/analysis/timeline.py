"""Rows for drawing one step: what ran on each stream, and what the CPU's annotations say.

A step of a large model has ten thousand kernels; a page needs some hundred bars.  Beyond a cap, neighbours of
the same category and FSDP unit with small gaps between them are joined, the smallest gaps first, so that long
events and long gaps stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from fsdpbench.reports.analysis.activity import Activity, Work, find_activity
from fsdpbench.reports.analysis.model import StepAnalysis
from fsdpbench.reports.analysis.units import FsdpSpans, fsdp_spans, unit_of_work
from fsdpbench.reports.analysis.windows import phase_marks
from fsdpbench.reports.readers import MISSING, Trace
from fsdpbench.reports.readers.trace import Int32


@dataclass(frozen=True)
class Bar:
    """start: ns after the step's start; duration: ns; count: how many events were joined into it."""

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

    Bars have the categories "computation", "communication", "copy", "phase" and "fsdp". Those that reach over
    the step's window are cut at its edges.
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
    """Return the outer operators alone: operators call operators."""
    kept: list[Bar] = []
    for bar in sorted(bars, key=lambda bar: (bar.start, -bar.duration)):
        if not kept or bar.start >= kept[-1].start + kept[-1].duration:
            kept.append(bar)
    return kept


def _thin(bars: Sequence[Bar], most: int) -> list[Bar]:
    """Return at most `most` bars: neighbours and gaps shorter than a resolution are joined.

    The resolution doubles until few enough are left; long bars and long gaps stay. Bars of different units or
    categories join only when nothing else helps.
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
        """Return a bar for what lasts from `begin` to `until`, cut at both ends of the drawing."""
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
