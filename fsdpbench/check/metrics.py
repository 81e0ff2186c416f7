"""The figures that the gate compares, and which way each of them gets worse.

On `sim` every one of them is exact. On real devices counts still are, as a rule, and the rest has a
distribution over runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from fsdpbench.reports.reading import one_line

# One figure as it was read: a number that can be true, `None` where it is unknown, or what is there
# instead and why it cannot be one.

LARGEST = 2.0**63
"""No time, size or count of a step is beyond it, and sums and differences below it stay finite."""

_LONGEST_VALUE = 60


@dataclass(frozen=True)
class Unusable:
    """`shown`: what was read.  why: it is not a figure."""

    shown: str
    why: str

    @classmethod
    def of(cls, value: object, why: str) -> Unusable:
        """For what was read, of any type and length."""
        huge = isinstance(value, int) and abs(value) > LARGEST
        return cls("an integer beyond 2^63" if huge else one_line(repr(value), _LONGEST_VALUE), why)

    def __str__(self) -> str:
        return f"{self.shown} ({self.why})"


Figure = float | None | Unusable


def figure_from(value: object, least: float = 0.0, most: float = LARGEST) -> Figure:
    """`value` as a figure between `least` and `most`."""
    if value is None or isinstance(value, Unusable):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        return Unusable.of(value, "no number")
    if isinstance(value, float) and not math.isfinite(value):
        return Unusable.of(value, "not finite")
    if value < least:
        return Unusable.of(value, "negative" if value < 0 else "impossibly small")
    if value > most:
        return Unusable.of(value, f"above {most:g}, which cannot be")
    return value


class Worse(Enum):
    """The direction in which a figure gets worse; NEITHER where a change is only worth knowing."""

    HIGHER = "higher"
    LOWER = "lower"
    NEITHER = "neither"


@dataclass(frozen=True)
class Metric:
    """A figure of a result: its unit, which way is worse, and its name in `reports.consistency`, the dotted
    place in `result.json` or what is computed from several.

    measured_only: says nothing more where a step is exact.  least, most: what no training step goes beyond.
    """

    name: str
    rule_name: str
    unit: str
    worse: Worse
    measured_only: bool = False
    least: float = 0.0
    most: float = LARGEST

    def checked(self, value: object) -> Figure:
        """`value` as this figure."""
        return figure_from(value, self.least, self.most)


def _metric(
    name: str, unit: str, *path: str, worse: Worse = Worse.HIGHER, least: float = 0.0, most: float = LARGEST
) -> Metric:
    return Metric(name, ".".join(path) or name, unit, worse, least=least, most=most)


def _peak(kind: str) -> Metric:
    return _metric(f"peak_{kind}_bytes", "B", "peak_memory_bytes", kind, least=1)


def _collective(kind: str) -> tuple[Metric, ...]:
    return (
        _metric(f"{kind}_count", "", "communication", kind, "count"),
        _metric(f"{kind}_bytes", "B", "communication", kind, "bytes"),
    )


_NANOSECOND = 1e-9
"""Clocks and traces count them: no step takes less, nor does what it computes."""

_SOME = 1e-6
"""A mean over steps of what every step has at least once in a while."""

METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        _metric("step_time_s", "s", least=_NANOSECOND),
        # What disturbs a step only ever adds to it: the fastest one of a run is the least disturbed.
        Metric("fastest_step_s", "fastest_step_s", "s", Worse.HIGHER, True, least=_NANOSECOND),
        _metric("exposed_communication_s", "s", "time_s", "exposed_communication"),
        # All computation: what is hidden moves between the two parts, and is computed all the same.
        _metric("compute_s", "s", least=_NANOSECOND),
        _metric("overlap_fraction", "", worse=Worse.LOWER, most=1.0),
        _peak("allocated"),
        _peak("active"),
        _peak("reserved"),
        _metric("alloc_retries_per_step", ""),
        _metric("ooms", ""),
        *_collective("all_gather"),
        *_collective("reduce_scatter"),
        *_collective("all_reduce"),
        _metric("prefetched_all_gathers", "", worse=Worse.LOWER),
        _metric("late_all_gathers", ""),
        _metric("kernels", "", "work", "kernels", least=_SOME),
        _metric("copies", "", "work", "copies"),
        _metric("limiter_waits", "", "work", "limiter_waits", worse=Worse.NEITHER),
    )
}

WITNESSES: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        _metric("overlapped_s", "s", "time_s", "overlapped"),
        _metric("idle_s", "s", "time_s", "idle"),
        _metric("traced_step_time_s", "s"),
    )
}
"""Not judged, but kept in a baseline: they bind the figures that are (`reports.consistency`)."""

ALL = {**METRICS, **WITNESSES}

ALWAYS_KNOWN = "step_time_s"
"""Of every configuration that ended well, on every device."""


def figures_of(values: Mapping[str, Any]) -> dict[str, Figure]:
    """Every metric and witness by name, of `values` by name in `reports.consistency`: None where it is not
    known, `Unusable` where it cannot be one."""
    is_exact = values.get("device") == "sim"
    return {
        name: None if metric.measured_only and is_exact else metric.checked(values.get(metric.rule_name))
        for name, metric in ALL.items()
    }
