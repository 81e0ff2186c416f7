"""Time parts and collective figures of windows, from an activity's interval sets."""

from __future__ import annotations

import numpy as np

from fsdpbench.reports import intervals
from fsdpbench.reports.analysis.device.activity import Activity, Collectives
from fsdpbench.reports.analysis.device.naming import COLLECTIVE_TYPES
from fsdpbench.reports.analysis.device.windows import OTHER_PHASE, Window
from fsdpbench.reports.analysis.model import CollectiveFigures
from fsdpbench.reports.analysis.time_parts import TimeParts
from fsdpbench.reports.intervals import Intervals
from fsdpbench.reports.trace import MISSING
from fsdpbench.reports.trace.model import Bool


def time_parts(activity: Activity, start: int, end: int) -> TimeParts:
    """How [start, end) was spent."""

    def within(what: Intervals) -> int:
        return intervals.clip(what, start, end).length()

    compute_only = within(activity.compute_only)
    overlapped = within(activity.overlapped)
    exposed = within(activity.exposed)
    idle = max(end - start, 0) - compute_only - overlapped - exposed
    return TimeParts(compute_only, overlapped, exposed, idle, within(activity.copies))


def phase_parts(activity: Activity, step: Window, phases: list[Window]) -> dict[str, TimeParts]:
    """Parts by phase name; "other" is what is left of the step, so that all parts sum to the step's."""
    if not phases:
        return {}
    parts: dict[str, TimeParts] = {}
    outside = intervals.single(step.start, step.end)
    for phase in phases:
        name = phase.mark.name
        parts[name] = parts.get(name, TimeParts()) + time_parts(activity, phase.start, phase.end)
        outside = intervals.subtract(outside, intervals.single(phase.start, phase.end))
    other = TimeParts()
    for start, end in zip(outside.start.tolist(), outside.end.tolist(), strict=True):
        other += time_parts(activity, start, end)
    parts[OTHER_PHASE] = other
    return parts


def collective_figures(
    activity: Activity, mask: Bool | None = None, window: Window | None = None
) -> dict[str, CollectiveFigures]:
    """Figures by type of the collectives under `mask`.

    With a window: counted are those asked for within its mark, timed is what is in the window, so that no
    time is missed or counted twice where a collective crosses from one step into the next.
    """
    collectives = activity.collectives
    selected = np.ones(len(collectives), np.bool_) if mask is None else mask
    counted = selected
    if window is not None and window.mark.name:
        asked = collectives.work.asked()
        counted = selected & (asked >= window.mark.start) & (asked < window.mark.end)
    figures: dict[str, CollectiveFigures] = {}
    for number, kind in enumerate(COLLECTIVE_TYPES):
        of_kind = collectives.kind == number
        if not (of_kind & selected).any():
            continue
        rows = of_kind & selected
        time = intervals.of(collectives.work.start[rows], collectives.work.end[rows])
        if window is not None:
            time = intervals.clip(time, window.start, window.end)
        counts = of_kind & counted
        if not len(time) and not counts.any():
            continue
        exposed = intervals.intersect(time, activity.exposed).length()
        figures[str(kind)] = _sized(collectives, counts, time.length(), exposed)
    return figures


def _sized(collectives: Collectives, rows: Bool, time: int, exposed: int) -> CollectiveFigures:
    count = int((rows & collectives.leads).sum())
    sized = rows & (collectives.message != MISSING)
    on_wire = rows & (collectives.wire != MISSING)
    complete = bool(rows.any()) and bool((sized == rows).all())
    duration = collectives.work.end - collectives.work.start
    timed = on_wire & (duration > 0)
    # Bytes per ns.
    fastest = float((collectives.wire[timed] / duration[timed]).max(initial=0))
    bound = timed & (collectives.roof > 0)
    ideal = collectives.wire[bound] / collectives.roof[bound]
    return CollectiveFigures(
        count=count,
        bytes=int(collectives.message[sized].sum()) if complete else None,
        wire_bytes=int(collectives.wire[on_wire].sum())
        if complete and bool((on_wire == rows).all())
        else None,
        time=time,
        exposed=exposed,
        sized_time=int(duration[on_wire].sum()),
        best_bandwidth=fastest * 1e9 or None,
        ideal_time=round(float(ideal.sum()) * 1e9) if rows.any() and bool((bound == timed).all()) else None,
    )
