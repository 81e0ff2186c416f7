"""What ran, by name: how often and how long, the ground on which two traces are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fsdpbench.reports.analysis.device.activity import Activity
from fsdpbench.reports.analysis.device.windows import Window
from fsdpbench.reports.trace import Trace


@dataclass(frozen=True)
class NameTotal:
    """Kernels, copies and collectives of one name (operators on a CPU trace), over all steps; time in ns.

    The time of operators includes that of operators inside them.
    """

    name: str
    count: int
    time: int


def name_totals(trace: Trace, activity: Activity, windows: Sequence[Window]) -> tuple[NameTotal, ...]:
    """Everything that was launched within the steps, the longest first."""
    work = activity.work
    asked = work.asked()
    starts = np.array([window.mark.start for window in windows], np.int64)
    ends = np.array([window.mark.end for window in windows], np.int64)
    place = np.searchsorted(starts, asked, side="right") - 1
    inside = (place >= 0) & (asked < ends[np.maximum(place, 0)])
    names = trace.events.name[work.row[inside]]
    counts = np.bincount(names, minlength=len(trace.names))
    found, where = np.unique(names, return_inverse=True)
    times = np.zeros(len(found), np.int64)
    np.add.at(times, where, (work.end - work.start)[inside])
    order = np.lexsort((found, -times))
    return tuple(
        NameTotal(trace.names[number], int(counts[number]), int(time))
        for number, time in zip(found[order].tolist(), times[order].tolist(), strict=True)
    )
