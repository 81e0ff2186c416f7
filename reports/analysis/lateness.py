"""Lateness of FSDP units' all-gathers: whether each was done when its parameters were needed, and why not.

For one all-gather, on the time axis:

    CPU           issued            waits (wait_all_gather)
                    |                  |
    collective      |   (queued)   [started ....... ended]
    computation   ....... previous work ]        needed |xxxxxxxxxxx| first work that uses the parameters
                                                  ^ late = ended - needed

`needed` is when the device could have continued: all work launched before the wait has ended, and the first
work after it has been launched.  The time by which the gather is late is split by what it waited for, in
order: for the CPU to issue it (the rate limiter's share apart), in the queue behind other collectives, for an
event (memory, a cast), and for the transfer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from fsdpbench.reports.analysis import intervals
from fsdpbench.reports.analysis.activity import UNKNOWN_TIME, Activity
from fsdpbench.reports.analysis.naming import COLLECTIVE_TYPES, CollectiveType
from fsdpbench.reports.analysis.records import seconds
from fsdpbench.reports.analysis.units import LIMITER_WAIT, NOTHING, FsdpSpans, unit_of
from fsdpbench.reports.analysis.windows import Mark, Window, containing
from fsdpbench.reports.readers import MISSING
from fsdpbench.reports.readers.trace import Bool, Columns, Int32, Int64

TOLERANCE_NS = 1000
"""Lateness below this does not count: launch latency and clock resolution."""

_WAITS = ("wait_all_gather", "all_gather_copy_out")
_TURNS = ("pre_forward", "pre_backward", "post_forward", "post_backward")

_NEIGHBOURS = 8
"""Number of earlier collectives searched for the one that a gather queued behind: few run at a time."""


class LateCause(StrEnum):
    """Causes of a late all-gather.

    FIRST: the first of its step; nothing before it could hide it.
    BLOCKING: on a CPU trace, the issuing call returned only when the gather was done.
    NO_PREFETCH: issued only at the unit's own turn; an earlier issue would have helped.
    RATE_LIMITER: the CPU waited for the limiter.
    CPU_LATE: the CPU was not ahead of the device.
    QUEUED: behind another collective.
    EVENT: launched in time on a free stream, it waited for something else.
    TRANSFER: it ran as early as possible, but takes longer than the computation beside it.
    """

    FIRST = "first_of_step"
    BLOCKING = "blocking"
    NO_PREFETCH = "no_prefetch"
    RATE_LIMITER = "rate_limiter"
    CPU_LATE = "cpu_late"
    QUEUED = "queued"
    EVENT = "event"
    TRANSFER = "transfer"


@dataclass(frozen=True)
class GatherTiming:
    """One all-gather; times in ns on the trace's clock.

    waited: the parts of `late`, ns, by CPU_LATE, RATE_LIMITER, QUEUED, EVENT and TRANSFER.
    phase: "forward", "backward", ... as annotated on the CPU, or None.  prefetched: issued before the unit's
    own turn.  behind: "<type> (<unit>)" of the collective that ended when this one began, if this one had to
    wait for it.  cause: None if it was in time.
    """

    unit: str
    step: int
    phase: str | None
    issued: int
    started: int
    ended: int
    needed: int
    prefetched: bool
    waited: dict[LateCause, int]
    behind: str | None
    cause: LateCause | None

    @property
    def late(self) -> int:
        """Return the ns that the device waited for it."""
        return max(self.ended - self.needed, 0)

    def to_dict(self, origin: int) -> dict[str, object]:
        """Return plain values, with times in seconds after `origin` (ns on the trace's clock)."""
        return {
            "step": self.step,
            "phase": self.phase,
            **{
                f"{name}_s": seconds(getattr(self, name) - origin)
                for name in ("issued", "started", "ended", "needed")
            },
            "late_s": seconds(self.late if self.cause is not None else 0),
            "cause": None if self.cause is None else str(self.cause),
            "waited_s": {str(cause): seconds(ns) for cause, ns in self.waited.items()},
            "prefetched": self.prefetched,
            "behind": self.behind,
        }


def time_gathers(
    activity: Activity, spans: FsdpSpans, steps: Sequence[Window], phases: Sequence[Mark]
) -> list[GatherTiming]:
    """Return every all-gather that belongs to an FSDP unit, a step and a wait, in order of its issue.

    Args:
        activity, spans: a trace's work and its FSDP annotations.
        steps, phases: windows of the steps, and marks of the phases, in order and disjoint.
    """
    work = activity.collectives.work
    unit = unit_of(spans, work.launch_lane, work.launch)
    gathers = _gathers(activity, spans, unit)
    wait = _waits(spans, gathers.unit, gathers.issued)
    step = containing([window.mark for window in steps], gathers.issued)
    known = (wait != UNKNOWN_TIME) & (step >= 0)
    if not known.any():
        return []
    return _timings(activity, spans, steps, phases, unit, gathers.select(known), wait[known], step[known])


@dataclass(frozen=True, eq=False)
class _Gathers(Columns):
    """All-gathers in order of their issue, one row each; times in ns.

    row: index in `activity.collectives`, of the first if several broadcasts are one all-gather.  around: row
    of the annotation around its issue.
    """

    row: Int64
    unit: Int32
    lane: Int32
    around: Int64
    issued: Int64
    started: Int64
    ended: Int64


def _gathers(activity: Activity, spans: FsdpSpans, unit: Int32) -> _Gathers:
    """Return the all-gathers of FSDP units; `unit`: the unit of each collective."""
    collectives, work = activity.collectives, activity.collectives.work
    kind = COLLECTIVE_TYPES.index(CollectiveType.ALL_GATHER)
    rows = np.flatnonzero((collectives.kind == kind) & (unit != MISSING))
    around = spans.index.innermost(work.launch_lane[rows], work.launch[rows])
    started, ended = work.start[rows], work.end[rows]
    # Broadcasts, one per rank, that form one all-gather count once, from the first start to the last end
    # (test_lateness_and_verdict.py, test_an_all_gather_of_broadcasts_counts_once).
    leads = collectives.leads[rows]
    lead = {annotation: place for place, annotation in enumerate(around.tolist()) if leads[place]}
    parts = np.flatnonzero(~leads)
    whole = np.array([lead[annotation] for annotation in around[parts].tolist()], np.int64)
    np.minimum.at(started, whole, started[parts])
    np.maximum.at(ended, whole, ended[parts])
    found = _Gathers(rows, unit[rows], work.launch_lane[rows], around, work.launch[rows], started, ended)
    order = np.argsort(found.issued, kind="stable")
    return found.select(order[leads[order]])


def _waits(spans: FsdpSpans, unit: Int32, issued: Int64) -> Int64:
    """Return the start (ns) of each unit's first wait that ends after the issue, or UNKNOWN_TIME."""
    found = np.full(len(unit), UNKNOWN_TIME, np.int64)
    waits = spans.named(*_WAITS)
    for each in np.unique(unit).tolist():
        own = np.flatnonzero(waits & (spans.unit == each))
        asked = np.flatnonzero(unit == each)
        # The waits of one unit follow each other, so their ends are sorted like their starts.
        place = np.searchsorted(spans.end[own], issued[asked], side="left")
        there = place < len(own)
        found[asked[there]] = spans.start[own[place[there]]]
    return found


def _needed(activity: Activity, wait: Int64, issued: Int64, ended: Int64, blocking: Bool) -> Int64:
    """Return when (ns) the device could have continued; on a CPU trace, the thread that waits."""
    if activity.kind == "cpu":
        return np.where(blocking, issued, np.minimum(wait, ended))
    main = activity.work.mainline()
    launched, reached = main.launch, np.maximum.accumulate(main.end)
    before = np.searchsorted(launched, wait, side="left")
    # All work launched before the wait has ended, and the work after it has been launched.
    last_end = np.where(before > 0, np.append(reached, 0)[before - 1], wait)
    consumer = np.where(before < len(launched), np.append(launched, 0)[before], wait)
    needed: Int64 = np.minimum(np.maximum(np.maximum(last_end, consumer), wait), ended)
    return needed


def _timings(
    activity: Activity,
    spans: FsdpSpans,
    steps: Sequence[Window],
    phases: Sequence[Mark],
    unit: Int32,
    gathers: _Gathers,
    wait: Int64,
    step: Int64,
) -> list[GatherTiming]:
    """Return a timing for each of `gathers`.

    Args:
        unit: the unit of each collective, index into `spans.units`.
        wait: ns at which the CPU began to wait for each gather.
        step: index of each gather's step in `steps`.
    """
    issued, started, ended = gathers.issued, gathers.started, gathers.ended
    blocking = np.full(len(wait), activity.kind == "cpu") & (spans.end[gathers.around] >= ended)
    needed = _needed(activity, wait, issued, ended, blocking)
    parts = _split(activity, spans, needed, issued, started, ended)
    prefetched = _prefetched(activity, spans, gathers, wait)
    phase = containing(phases, issued).tolist()
    first = np.concatenate([[True], step[1:] != step[:-1]])
    times = [*zip(issued.tolist(), started.tolist(), ended.tolist(), needed.tolist(), strict=True)]
    shares = zip(*(column.tolist() for column in parts.values()), strict=True)
    found: list[GatherTiming] = []
    for i, (row, share) in enumerate(zip(gathers.row.tolist(), shares, strict=True)):
        waited = dict(zip(parts, share, strict=True))
        behind = _behind(activity, spans, unit, row)
        cause = None
        if ended[i] - needed[i] > TOLERANCE_NS:
            cause = _cause(waited, bool(prefetched[i]), behind)
            if first[i] or blocking[i]:
                cause = LateCause.FIRST if first[i] else LateCause.BLOCKING
        place = spans.units[unit[row]], steps[step[i]].index, phases[phase[i]].name if phase[i] >= 0 else None
        found.append(GatherTiming(*place, *times[i], bool(prefetched[i]), waited, behind, cause))
    return found


def _split(
    activity: Activity, spans: FsdpSpans, needed: Int64, issued: Int64, started: Int64, ended: Int64
) -> dict[LateCause, Int64]:
    """Return the ns between `needed` and `ended` of each gather, split by what it waited for."""
    limiter_waits = spans.times(LIMITER_WAIT)
    issue_by = np.minimum(issued, ended)
    limiter = intervals.covered(limiter_waits, needed, issue_by)
    held_from, held_to = np.maximum(needed, issued), np.minimum(started, ended)
    queued = intervals.covered(activity.communication, held_from, held_to)
    return {
        LateCause.CPU_LATE: np.maximum(issue_by - needed, 0) - limiter,
        LateCause.RATE_LIMITER: limiter,
        LateCause.QUEUED: queued,
        LateCause.EVENT: np.maximum(held_to - held_from, 0) - queued,
        LateCause.TRANSFER: np.maximum(ended - np.maximum(needed, started), 0),
    }


def _cause(waited: dict[LateCause, int], prefetched: bool, behind: str | None) -> LateCause:
    mainly = max(waited, key=lambda cause: waited[cause])
    if prefetched or mainly in (LateCause.RATE_LIMITER, LateCause.CPU_LATE):
        return mainly
    # An earlier issue would not have helped if other gathers kept the network busy until this one started.
    if behind is not None and behind.startswith(CollectiveType.ALL_GATHER):
        return mainly
    return LateCause.NO_PREFETCH


def _prefetched(activity: Activity, spans: FsdpSpans, gathers: _Gathers, wait: Int64) -> Bool:
    """Return which were issued in another unit's turn; without turns, before work that precedes the wait."""
    is_turn = spans.named(*_TURNS)
    place = gathers.around.copy()
    while True:
        climb = (place != NOTHING) & ~is_turn[place]
        if not climb.any():
            break
        place[climb] = spans.parent_of[place[climb]]
    launched = activity.work.mainline().launch
    between = np.searchsorted(launched, wait) > np.searchsorted(launched, gathers.issued)
    prefetched: Bool = np.where(place != NOTHING, spans.unit[place] != gathers.unit, between)
    return prefetched


def _behind(activity: Activity, spans: FsdpSpans, unit: Int32, row: int) -> str | None:
    """Return the collective that ended just when this one, issued before, could start."""
    work = activity.collectives.work
    started, launch = int(work.start[row]), int(work.launch[row])
    # Collectives are sorted by start: of those just before, take the last to end.
    last: int | None = None
    for other in range(row - 1, max(row - 1 - _NEIGHBOURS, -1), -1):
        end = int(work.end[other])
        if launch < end <= started and end >= started - TOLERANCE_NS:
            last = other if last is None or end > int(work.end[last]) else last
    if last is None:
        return None
    name = spans.units[unit[last]] if unit[last] != MISSING else "no unit"
    return f"{COLLECTIVE_TYPES[activity.collectives.kind[last]]} ({name})"
