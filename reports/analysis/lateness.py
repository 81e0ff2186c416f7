"""Whether each FSDP unit's all-gather was there when its parameters were needed, and if not, why.

For one all-gather, on the time axis:

    CPU           issued            waits (wait_all_gather)
                    |                  |
    collective      |   (queued)   [started ....... ended]
    computation   ....... previous work ]        needed |xxxxxxxxxxx| first work that uses the parameters
                                                  ^ late = ended - needed

`needed` is when the device could have gone on: everything launched before the wait has ended, and the first
work after it has been launched.  The time by which the gather is late is split by what it was waiting for, in
order: for the CPU to issue it (the rate limiter's share apart), in the queue behind other collectives, for an
event (memory, a cast), and in transfer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from reports import intervals
from reports.analysis.activity import UNKNOWN_TIME, Activity
from reports.analysis.naming import COLLECTIVE_TYPES, CollectiveType
from reports.analysis.nesting import NOTHING
from reports.analysis.units import FsdpSpans, unit_of
from reports.analysis.windows import Mark, Window
from reports.trace import MISSING
from reports.trace.model import Int32, Int64

TOLERANCE_NS = 1000
"""Lateness below this is none: launch latencies and the clock's grain."""

_WAITS = ("wait_all_gather", "all_gather_copy_out")
_TURNS = ("pre_forward", "pre_backward", "post_forward", "post_backward")
_LIMITER = "limiter_wait"


class LateCause(StrEnum):
    """Why an all-gather came late.

    FIRST: the first of its step; nothing before it could hide it.
    NO_PREFETCH: issued at the unit's own turn only, and an earlier issue would have helped.
    RATE_LIMITER: the CPU waited for the limiter.
    CPU_LATE: the CPU was not ahead of the device.
    QUEUED: behind another collective.
    EVENT: launched in time, its stream free, it waited for something else.
    TRANSFER: it ran as early as it could, and takes longer than the computation beside it.
    """

    FIRST = "first_of_step"
    NO_PREFETCH = "no_prefetch"
    RATE_LIMITER = "rate_limiter"
    CPU_LATE = "cpu_late"
    QUEUED = "queued"
    EVENT = "event"
    TRANSFER = "transfer"


@dataclass(frozen=True)
class GatherTiming:
    """One all-gather; times in ns on the trace's clock, the components of `late` in ns.

    phase: "forward", "backward", ... as annotated on the CPU, or None.  prefetched: issued before the unit's
    own turn.  behind: "<type> (<unit>)" of the collective that ended when this one began, if it had to wait
    for that.  cause: None when it was in time.
    """

    unit: str
    step: int
    phase: str | None
    issued: int
    started: int
    ended: int
    needed: int
    prefetched: bool
    cpu: int
    limiter: int
    queued: int
    event: int
    transfer: int
    behind: str | None
    cause: LateCause | None

    @property
    def late(self) -> int:
        return max(self.ended - self.needed, 0)


def time_gathers(
    activity: Activity, spans: FsdpSpans, steps: Sequence[Window], phases: Sequence[Mark]
) -> list[GatherTiming]:
    """Every all-gather that belongs to an FSDP unit and has a wait, in order of its issue."""
    return _Timer(activity, spans, steps, phases).run()


class _Timer:
    """The tables that each all-gather is looked up in."""

    def __init__(
        self, activity: Activity, spans: FsdpSpans, steps: Sequence[Window], phases: Sequence[Mark]
    ) -> None:
        self.on_device = activity.kind == "gpu"
        self.spans, self.steps, self.phases = spans, steps, phases
        self.collectives = activity.collectives
        work = activity.work
        computing = ~work.is_communication & ~work.is_copy & (work.launch != UNKNOWN_TIME)
        order = np.argsort(work.launch[computing], kind="stable")
        self.launched: Int64 = work.launch[computing][order]
        self.reached: Int64 = np.maximum.accumulate(work.end[computing][order])
        placed = self.collectives.work
        self.unit: Int32 = unit_of(spans, placed.launch_lane, placed.launch)
        names = np.array(spans.events, dtype=object)
        self.is_wait = np.isin(names[spans.event] if len(spans) else names, _WAITS)
        limiter = np.flatnonzero(np.fromiter((spans.events[e] == _LIMITER for e in spans.event), np.bool_))
        self.limiter = intervals.of(spans.start[limiter], spans.end[limiter])
        self.communicating = intervals.of(placed.start, placed.end)

    def run(self) -> list[GatherTiming]:
        gather = COLLECTIVE_TYPES.index(CollectiveType.ALL_GATHER)
        found: list[GatherTiming] = []
        launch = self.collectives.work.launch
        rows = np.flatnonzero((self.collectives.kind == gather) & (self.unit != MISSING))
        for row in rows[np.argsort(launch[rows], kind="stable")].tolist():
            wait = self._wait_of(row)
            step = next((s for s in self.steps if s.mark.start <= launch[row] < s.mark.end), None)
            if wait is not None and step is not None:
                first = not found or found[-1].step != step.index
                found.append(self._time(row, wait, step, first))
        return found

    def _wait_of(self, row: int) -> int | None:
        """Start of the unit's first wait after the issue."""
        spans = self.spans
        issued = int(self.collectives.work.launch[row])
        candidates = np.flatnonzero(self.is_wait & (spans.unit == self.unit[row]) & (spans.end >= issued))
        return int(spans.start[candidates[0]]) if len(candidates) else None

    def _time(self, row: int, wait: int, step: Window, first: bool) -> GatherTiming:
        work = self.collectives.work
        issued, started, ended = int(work.launch[row]), int(work.start[row]), int(work.end[row])
        before = int(np.searchsorted(self.launched, wait, side="left"))
        needed = wait
        if self.on_device:
            reached = int(self.reached[before - 1]) if before else wait
            consumer = int(self.launched[before]) if before < len(self.launched) else wait
            needed = max(reached, consumer, wait)
        needed = min(needed, ended)
        until_issued = intervals.single(needed, min(issued, ended))
        limiter = intervals.intersect(until_issued, self.limiter).length()
        held = intervals.single(max(needed, issued), min(started, ended))
        queued = intervals.intersect(held, self.communicating).length()
        transfer = ended - max(needed, started)
        parts = {
            LateCause.CPU_LATE: until_issued.length() - limiter,
            LateCause.RATE_LIMITER: limiter,
            LateCause.QUEUED: queued,
            LateCause.EVENT: held.length() - queued,
            LateCause.TRANSFER: max(transfer, 0),
        }
        prefetched = self._prefetched(row, wait)
        behind = self._behind(row)
        cause = None
        if ended - needed > TOLERANCE_NS:
            cause = LateCause.FIRST if first else self._cause(parts, prefetched, behind)
        return GatherTiming(
            unit=self.spans.units[self.unit[row]],
            step=step.index,
            phase=next((mark.name for mark in self.phases if mark.start <= issued < mark.end), None),
            issued=issued,
            started=started,
            ended=ended,
            needed=needed,
            prefetched=prefetched,
            cpu=parts[LateCause.CPU_LATE],
            limiter=limiter,
            queued=queued,
            event=parts[LateCause.EVENT],
            transfer=parts[LateCause.TRANSFER],
            behind=behind,
            cause=cause,
        )

    @staticmethod
    def _cause(parts: dict[LateCause, int], prefetched: bool, behind: str | None) -> LateCause:
        mainly = max(parts, key=lambda cause: parts[cause])
        if prefetched or mainly in (LateCause.RATE_LIMITER, LateCause.CPU_LATE):
            return mainly
        # An earlier issue would not have helped where the wire was busy with other gathers to the very start.
        if behind is not None and behind.startswith(CollectiveType.ALL_GATHER):
            return mainly
        return LateCause.NO_PREFETCH

    def _prefetched(self, row: int, wait: int) -> bool:
        """Issued in another unit's turn; without turns around it, with work launched before the wait."""
        spans, unit = self.spans, int(self.unit[row])
        issued = int(self.collectives.work.launch[row])
        lane = self.collectives.work.launch_lane[row]
        place = int(spans.index.innermost(np.array([lane]), np.array([issued]))[0])
        while place != NOTHING:
            if spans.events[spans.event[place]] in _TURNS:
                return int(spans.unit[place]) != unit
            place = int(spans.parent_of[place])
        low, high = np.searchsorted(self.launched, [issued, wait])
        return bool(high > low)

    def _behind(self, row: int) -> str | None:
        """The collective that ended just when this one could start."""
        work = self.collectives.work
        started = int(work.start[row])
        near = np.flatnonzero((work.end <= started) & (work.end >= started - TOLERANCE_NS))
        near = near[work.end[near] > work.launch[row]]
        if not len(near):
            return None
        last = int(near[np.argmax(work.end[near])])
        unit = self.unit[last]
        name = self.spans.units[unit] if unit != MISSING else "no unit"
        return f"{COLLECTIVE_TYPES[self.collectives.kind[last]]} ({name})"
