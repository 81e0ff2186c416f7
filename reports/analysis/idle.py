"""Why the device was idle: did the CPU bring its next work too late, or did the work wait for something else?

device   [work]        idle          [next work]
CPU               launch of next work ^
             |-- cpu --|-- other -----|
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reports import intervals
from reports.analysis.activity import UNKNOWN_TIME, Activity
from reports.analysis.time_units import seconds


@dataclass(frozen=True)
class IdleCauses:
    """Idle time of the device within the steps, ns.

    cpu: the next work had not been launched yet; other: it had, and waited (launch latency, an event). Both
    are None on a CPU trace, or where launches are unknown.
    """

    cpu: int | None = None
    other: int | None = None

    def to_dict(self) -> dict[str, float | None]:
        return {
            "cpu": None if self.cpu is None else seconds(self.cpu),
            "other": None if self.other is None else seconds(self.other),
        }


def find_idle_causes(activity: Activity, start: int, end: int) -> IdleCauses:
    """The causes within [start, end)."""
    work = activity.work
    if activity.kind != "gpu" or not len(work.row) or (work.launch == UNKNOWN_TIME).any():
        return IdleCauses()
    busy = intervals.union(
        activity.communication, intervals.union(activity.compute_only, activity.overlapped)
    )
    idle = intervals.subtract(intervals.single(start, end), busy)
    # Work is in order of its start: the first that starts at or after a gap's begin ends the gap.
    following = np.searchsorted(work.start, idle.start, side="left")
    there = following < len(work.row)
    launch = np.where(there, work.launch[np.minimum(following, len(work.row) - 1)], idle.end)
    cpu = int((np.clip(launch, idle.start, idle.end) - idle.start).sum())
    return IdleCauses(cpu, idle.length() - cpu)
