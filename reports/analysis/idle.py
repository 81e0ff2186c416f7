"""Causes of the device's idle time: what delayed the next launch, or the start of launched work.

    device   [work]            idle               [next work]
    CPU         cudaFree | limiter | cpu  launch ^
             |- allocator|-------- | cpu -|- waits -|

Until the launch of the next work the CPU is late: the driver's allocation calls, the rate limiter or a
synchronization blocked it, or it was busy with Python and operators. After the launch the work itself waits:
for an event of another stream or, if the wait is short, only for launch latency.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fsdpbench.reports.analysis import intervals
from fsdpbench.reports.analysis.activity import UNKNOWN_TIME, Activity
from fsdpbench.reports.analysis.naming import ALLOCATING, PATTERNS, SYNCHRONIZING, times_of
from fsdpbench.reports.analysis.records import seconds
from fsdpbench.reports.analysis.units import LIMITER_WAIT, FsdpSpans
from fsdpbench.reports.readers import Trace
from fsdpbench.reports.readers.trace import Int64

LAUNCH_LATENCY_NS = 20_000
"""Longest time between a launch and its start that counts as latency; more counts as waiting."""


@dataclass(frozen=True)
class IdleCauses:
    """Idle time of the device within the steps by cause, ns; the parts sum to it.

    allocator: the CPU was in the driver's allocation calls.  rate_limiter: it waited for FSDP's limiter.
    synchronization: it waited for the device in another way.  cpu: it had not launched the next work yet.
    launch_latency: launched work started soon.  event: launched work waited for something.
    All are None on a CPU trace, or if launches are unknown.
    """

    allocator: int | None = None
    rate_limiter: int | None = None
    synchronization: int | None = None
    cpu: int | None = None
    launch_latency: int | None = None
    event: int | None = None

    def parts(self) -> dict[str, int]:
        """Return the known causes, ns by name."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def to_dict(self) -> dict[str, float | None]:
        return {name: None if value is None else seconds(value) for name, value in vars(self).items()}


IDLE_WORDS: Mapping[str, str] = PATTERNS["idle"]
"""Descriptions of the causes, by name."""


def find_idle_causes(trace: Trace, activity: Activity, spans: FsdpSpans, start: int, end: int) -> IdleCauses:
    """Return the causes within [start, end), in ns.

    Args:
        activity, spans: the device work and the FSDP annotations of `trace`.
    """
    work = activity.work
    if activity.kind != "gpu" or not len(work.row) or (work.launch == UNKNOWN_TIME).any():
        return IdleCauses()
    busy = intervals.union(
        activity.communication, intervals.union(activity.compute_only, activity.overlapped)
    )
    idle = intervals.subtract(intervals.single(start, end), busy)
    # Work is sorted by start: the first work that starts at or after the beginning of a gap ends it.
    following = np.searchsorted(work.start, idle.start, side="left")
    there = following < len(work.row)
    launch = np.where(there, work.launch[np.minimum(following, len(work.row) - 1)], idle.end)
    launch = np.clip(launch, idle.start, idle.end)
    late = intervals.of(idle.start, launch)
    held: dict[str, int] = {}
    for name, what in (
        ("allocator", times_of(trace, ALLOCATING)),
        ("rate_limiter", spans.times(LIMITER_WAIT)),
        ("synchronization", times_of(trace, SYNCHRONIZING)),
    ):
        held[name] = intervals.intersect(late, what).length()
        late = intervals.subtract(late, what)
    waiting: Int64 = idle.end - launch
    latency = int(waiting[waiting <= LAUNCH_LATENCY_NS].sum())
    return IdleCauses(**held, cpu=late.length(), launch_latency=latency, event=int(waiting.sum()) - latency)
