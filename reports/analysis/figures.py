"""Time parts and collective figures of time windows, from the interval sets of an activity."""

from dataclasses import dataclass, fields

import numpy as np

from fsdpbench.reports.analysis import intervals
from fsdpbench.reports.analysis.activity import Activity, Collectives
from fsdpbench.reports.analysis.naming import COLLECTIVE_TYPES
from fsdpbench.reports.analysis.records import seconds
from fsdpbench.reports.analysis.windows import OTHER_PHASE, Window
from fsdpbench.reports.readers import MISSING
from fsdpbench.reports.readers.trace import Bool

PARTS = ("compute_only", "overlapped", "exposed_communication", "idle")
"""The parts of a step's time, which sum to it."""


@dataclass(frozen=True)
class TimeParts:
    """How a span of time was spent, ns; the four parts sum to the span exactly.

    compute_only: the device worked and no collective ran.  Copies and memory sets that run alone count as
        compute_only too; `memory_copy` is their time.
    overlapped: a collective ran beside computation.  exposed_communication: a collective ran and no
        computation did.  idle: nothing ran.
    """

    compute_only: int = 0
    overlapped: int = 0
    exposed_communication: int = 0
    idle: int = 0
    memory_copy: int = 0

    @property
    def total(self) -> int:
        """Return the whole span, ns."""
        return self.compute_only + self.overlapped + self.exposed_communication + self.idle

    @property
    def overlap_fraction(self) -> float | None:
        """Return the share of communication time hidden under computation; None without communication."""
        communication = self.overlapped + self.exposed_communication
        return self.overlapped / communication if communication else None

    def __add__(self, other: "TimeParts") -> "TimeParts":
        return TimeParts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def per(self, count: int) -> "TimeParts":
        """Return the mean of `count` such spans in whole ns; idle gets the rest, so parts still sum up."""
        compute, overlapped, exposed = (
            part // count for part in (self.compute_only, self.overlapped, self.exposed_communication)
        )
        idle = self.total // count - compute - overlapped - exposed
        return TimeParts(compute, overlapped, exposed, idle, self.memory_copy // count)

    def to_dict(self) -> dict[str, float]:
        return {name: seconds(getattr(self, name)) for name in PARTS}


@dataclass(frozen=True)
class CollectiveFigures:
    """All collectives of one type (of a rank, a step or an FSDP unit).

    count: number of launches.  bytes: the full buffers (gathered, or before reduction); wire_bytes: what a
    rank sends with a ring, as in nccl-tests' bus bandwidth (github.com/NVIDIA/nccl-tests, PERFORMANCE.md);
    both None if the trace has no sizes.  time: union of their intervals; exposed: the part of it without
    computation.  sized_time: summed durations of those with sizes, the denominator of the bandwidth.
    best_bandwidth: bytes per second of the fastest single one.
    ideal_time: ns that those with sizes would take at the peak of their links; None if unknown.
    """

    count: int = 0
    bytes: int | None = None
    wire_bytes: int | None = None
    time: int = 0
    exposed: int = 0
    sized_time: int = 0
    best_bandwidth: float | None = None
    ideal_time: int | None = None

    @property
    def bus_bandwidth(self) -> float | None:
        """Return the achieved bus bandwidth, bytes per second."""
        if not self.wire_bytes or not self.sized_time:
            return None
        return self.wire_bytes / seconds(self.sized_time)

    @property
    def roof_bandwidth(self) -> float | None:
        """Return bytes per second at the links' peak, from the hardware profile."""
        return self.wire_bytes / seconds(self.ideal_time) if self.wire_bytes and self.ideal_time else None

    @property
    def roof_share(self) -> float | None:
        """Return the achieved bus bandwidth as a share of the peak, or of the best seen if it is unknown."""
        roof = self.roof_bandwidth or self.best_bandwidth
        return self.bus_bandwidth / roof if self.bus_bandwidth and roof else None

    def to_dict(self) -> dict[str, float | int | None]:
        return {
            "count": self.count,
            "bytes": self.bytes,
            "wire_bytes": self.wire_bytes,
            "time_s": seconds(self.time),
            "exposed_s": seconds(self.exposed),
            "bus_bandwidth_bytes_per_s": self.bus_bandwidth,
            "best_bus_bandwidth_bytes_per_s": self.best_bandwidth,
            "roof_bus_bandwidth_bytes_per_s": self.roof_bandwidth,
            "roof_share": self.roof_share,
        }


def merge(figures: list[CollectiveFigures]) -> CollectiveFigures:
    """Return the combined figures of disjoint windows."""
    counted = [each for each in figures if each.count]

    def whole(values: list[int | None]) -> int | None:
        return None if not values or None in values else sum(filter(None, values))

    return CollectiveFigures(
        count=sum(each.count for each in figures),
        bytes=whole([each.bytes for each in counted]),
        wire_bytes=whole([each.wire_bytes for each in counted]),
        time=sum(each.time for each in figures),
        exposed=sum(each.exposed for each in figures),
        sized_time=sum(each.sized_time for each in figures),
        best_bandwidth=max((each.best_bandwidth for each in figures if each.best_bandwidth), default=None),
        ideal_time=whole([each.ideal_time for each in counted]),
    )


CONTRACT_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
"""Always present in `communication`; others only if they occurred."""


def communication_dict(
    communication: dict[str, CollectiveFigures],
) -> dict[str, dict[str, float | int | None]]:
    """Return the figures by type as plain values, `CONTRACT_COLLECTIVES` first."""
    names = [*CONTRACT_COLLECTIVES, *sorted(communication.keys() - set(CONTRACT_COLLECTIVES))]
    return {name: communication.get(name, CollectiveFigures()).to_dict() for name in names}


def time_parts(activity: Activity, start: int, end: int) -> "TimeParts":
    """Return how [start, end), in ns, was spent."""
    parts = activity.compute_only, activity.overlapped, activity.exposed, activity.copies
    computing, overlapped, exposed, copying = (intervals.clip(each, start, end).length() for each in parts)
    idle = max(end - start, 0) - computing - overlapped - exposed
    return TimeParts(computing, overlapped, exposed, idle, copying)


def phase_parts(activity: Activity, step: Window, phases: list[Window]) -> "dict[str, TimeParts]":
    """Return the parts by phase; "other" is the rest of the step, so that all parts sum to the step's."""
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
    """Return the figures by type of the collectives under `mask`.

    With a window: a collective counts if it was launched within the window's mark, and the part of its time
    inside the window counts. So one that crosses into the next step is neither missed nor counted twice.
    """
    collectives = activity.collectives
    selected = np.ones(len(collectives), np.bool_) if mask is None else mask
    counted = selected
    if window is not None and window.mark.name:
        asked = collectives.work.asked()
        counted = selected & (asked >= window.mark.start) & (asked < window.mark.end)
    figures: dict[str, CollectiveFigures] = {}
    for number, kind in enumerate(COLLECTIVE_TYPES):
        rows = selected & (collectives.kind == number)
        if not rows.any():
            continue
        time = intervals.of(collectives.work.start[rows], collectives.work.end[rows])
        if window is not None:
            time = intervals.clip(time, window.start, window.end)
        counts = rows & counted
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
        wire_bytes=int(collectives.wire[on_wire].sum()) if complete and (on_wire == rows).all() else None,
        time=time,
        exposed=exposed,
        sized_time=int(duration[on_wire].sum()),
        best_bandwidth=fastest * 1e9 or None,
        ideal_time=round(float(ideal.sum()) * 1e9) if rows.any() and bool((bound == timed).all()) else None,
    )
