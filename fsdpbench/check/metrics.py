"""The figures that the gate compares, and which way each of them gets worse.

On `sim` every one of them is exact. On real devices counts still are, as a rule, and the rest has a
distribution over runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from fsdpbench.check.figures import LARGEST, Figure, Unusable, figure_from, total


class Worse(Enum):
    """The direction in which a figure gets worse; NEITHER where a change is only worth knowing."""

    HIGHER = "higher"
    LOWER = "lower"
    NEITHER = "neither"


@dataclass(frozen=True)
class Metric:
    """A figure of a result: its unit, which way is worse, and the places in `result.json` that add up to
    it.

    measured_only: says nothing more where a step is exact.  of_samples: a list, of which the least counts.
    of_trace: counted over all traced steps, and compared as that of a mean one.
    least, most: what no training step goes beyond.
    """

    name: str
    paths: tuple[tuple[str, ...], ...]
    unit: str
    worse: Worse
    measured_only: bool = False
    of_samples: bool = False
    of_trace: bool = False
    least: float = 0.0
    most: float = LARGEST

    def of(self, result: Mapping[str, Any]) -> Figure:
        """The figure in `result`: `None` where it is not known, `Unusable` where it cannot be one."""
        if self.measured_only and result.get("device") == "sim":
            return None
        found = total([_figure_at(result, path, self.of_samples) for path in self.paths])
        if self.of_trace and isinstance(found, int | float):
            steps = _traced_steps(result)
            found = found // steps if found % steps == 0 else found / steps
        return self.checked(found)

    def checked(self, value: object) -> Figure:
        """`value` as this figure."""
        return figure_from(value, self.least, self.most)

    @property
    def rule_name(self) -> str:
        """Its name in `reports.result_rules`: where it lies in a result; its own where it is computed."""
        computed = len(self.paths) > 1 or self.of_samples or self.of_trace
        return self.name if computed else ".".join(self.paths[0])


def _traced_steps(result: Mapping[str, Any]) -> int:
    """1 where the result does not say."""
    value: Any = result
    for key in ("config", "measurement", "traced_steps"):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, int) and value > 0 else 1


def _figure_at(result: Mapping[str, Any], path: tuple[str, ...], of_samples: bool) -> Figure:
    value: Any = result
    for depth, key in enumerate(path):
        if value is None:
            return None
        if not isinstance(value, Mapping):
            return Unusable.of(value, f"{'.'.join(path[:depth])} is not an object")
        value = value.get(key)
    if value is None or not of_samples:
        return figure_from(value)
    if not isinstance(value, list):
        return Unusable.of(value, "no list of samples")
    samples: list[float] = []
    for sample in map(figure_from, value):
        if not isinstance(sample, int | float):
            return Unusable.of(value, f"of its samples, {sample or 'one is null'}")
        samples.append(sample)
    return min(samples, default=None)


def _metric(
    name: str,
    unit: str,
    *path: str,
    worse: Worse = Worse.HIGHER,
    least: float = 0.0,
    most: float = LARGEST,
) -> Metric:
    return Metric(name, (path or (name,),), unit, worse, least=least, most=most)


def _of_gathers(name: str, key: str, worse: Worse) -> Metric:
    return Metric(name, (("late_all_gathers", key),), "", worse, of_trace=True)


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

_SAMPLES = (("measured", "step_times_s"),)
_COMPUTED = (("time_s", "compute_only"), ("time_s", "overlapped"))

METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        _metric("step_time_s", "s", least=_NANOSECOND),
        # What disturbs a step only ever adds to it: the fastest one of a run is the least disturbed.
        Metric("fastest_step_s", _SAMPLES, "s", Worse.HIGHER, True, True, least=_NANOSECOND),
        _metric("exposed_communication_s", "s", "time_s", "exposed_communication"),
        # All computation: what is hidden moves between the two parts, and is computed all the same.
        Metric("compute_s", _COMPUTED, "s", Worse.HIGHER, least=_NANOSECOND),
        _metric("overlap_fraction", "", worse=Worse.LOWER, most=1.0),
        _peak("allocated"),
        _peak("active"),
        _peak("reserved"),
        _metric("alloc_retries_per_step", ""),
        _metric("ooms", ""),
        *_collective("all_gather"),
        *_collective("reduce_scatter"),
        *_collective("all_reduce"),
        _of_gathers("prefetched_all_gathers", "prefetched", Worse.LOWER),
        _of_gathers("late_all_gathers", "late", Worse.HIGHER),
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
"""Not judged, but kept in a baseline: they bind the figures that are (`reports.result_rules`)."""

ALL = {**METRICS, **WITNESSES}

ALWAYS_KNOWN = "step_time_s"
"""Of every configuration that ended well, on every device."""


def figures_of(result: Mapping[str, Any]) -> dict[str, Figure]:
    """Every metric and witness of `result` by name."""
    return {name: metric.of(result) for name, metric in ALL.items()}
