"""The timeline of one step, packed for the page's canvas (`timeline.js` has the reader).

Names and units are tables that the events index; starts are distances from the start before. That is about
twenty-five bytes an event, so that two hundred steps of nine hundred events fit in five megabytes::

    {"duration": ns, "names": [...], "units": [...],
     "rows": [{"label": "compute · stream 7", "lanes": 1,
               "s": [0, 5210, 3100], "d": [5000, 3000, 900], "n": [4, 4, 7], "u": [0, 0, -1],
               "c": "000", "l": "000"}]}
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from fsdpbench.reports.analysis import StepAnalysis
from fsdpbench.reports.analysis.naming import collective_type
from fsdpbench.reports.analysis.timeline import Bar, Row, stream_rows
from fsdpbench.reports.readers import Trace

# In the order of `Timeline.KINDS` in timeline.js.
KINDS = (
    "compute", "all_gather", "reduce_scatter", "all_reduce", "communication", "memory", "phase", "event",
    "wait",
)  # fmt: skip
MOST_ROWS = 16
_KIND_OF_CATEGORY = {"computation": "compute", "copy": "memory", "phase": "phase", "fsdp": "event"}

_COPIES = re.compile(r"memcpy|split_with_sizes_copy|chunk_cat|Copy|copy_kernel|CatArray", re.IGNORECASE)
"""Kernels that only move data, such as those that copy in or out of collectives."""

# The CPU itself stands still in these FSDP events; in all others it only issues work.
_CPU_WAITS = frozenset({"limiter_wait"})


def pack_timeline(trace: Trace, step: StepAnalysis, most_events: int) -> dict[str, object] | None:
    """Return the step's rows with at most about `most_events` events; None where nothing ran in it."""
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
    """Return all of the CPU's annotations, and as many streams and threads as a screen holds."""
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
"""Texts in the order of their first use, and the place of each."""


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
    """Return the row's label; a stream or thread is named after the kind of work that fills most of it."""
    if row.kind == "annotation":
        return row.label[:80]
    busy: Counter[str] = Counter()
    for bar in row.bars:
        busy["copies" if _COPIES.search(bar.name) else _kind(bar)] += bar.duration
    return f"{busy.most_common(1)[0][0].replace('_', '-')} · {row.label.partition(' (')[0]}"


def _lanes(bars: Sequence[Bar], most: int = 4) -> list[int]:
    """Return how deep each bar nests in those before (by start); bars deeper than `most` share a lane."""
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
    """Return the event's name, cut to what a tooltip holds."""
    name = bar.name if len(bar.name) <= 120 else f"{bar.name[:119]}…"
    return name if bar.count == 1 else f"{name} and {bar.count - 1} more"
