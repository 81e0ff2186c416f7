"""The figures that the gate compares, and which way each of them gets worse.

On `sim` every one of them is exact. On real devices counts still are, as a rule, and the rest has a
distribution over runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Worse(Enum):
    """The direction in which a figure gets worse; NEITHER where a change is only worth knowing."""

    HIGHER = "higher"
    LOWER = "lower"
    NEITHER = "neither"


@dataclass(frozen=True)
class Metric:
    """A figure of a result: its unit, which way is worse, and the places in `result.json` that add up to
    it; of a list of samples the least counts. `measured_only`: says nothing more where a step is exact."""

    name: str
    paths: tuple[tuple[str, ...], ...]
    unit: str
    worse: Worse
    measured_only: bool = False

    def of(self, result: Mapping[str, Any]) -> float | None:
        """The figure in `result`; `None` where it is not known."""
        if self.measured_only and result.get("device") == "sim":
            return None
        parts = [_number_at(result, path) for path in self.paths]
        known = [part for part in parts if part is not None]
        return sum(known) if len(known) == len(parts) else None


def _number_at(result: Mapping[str, Any], path: tuple[str, ...]) -> float | None:
    value: Any = result
    for key in path:
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    if isinstance(value, list):
        value = min(value, default=None)
    return value if isinstance(value, int | float) else None


def _metric(name: str, unit: str, *path: str, worse: Worse = Worse.HIGHER) -> Metric:
    return Metric(name, (path or (name,),), unit, worse)


def _collective(kind: str) -> tuple[Metric, ...]:
    return (
        _metric(f"{kind}_count", "", "communication", kind, "count"),
        _metric(f"{kind}_bytes", "B", "communication", kind, "bytes"),
    )


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        _metric("step_time_s", "s"),
        # What disturbs a step only ever adds to it: the fastest one of a run is the least disturbed.
        Metric("fastest_step_s", (("measured", "step_times_s"),), "s", Worse.HIGHER, measured_only=True),
        _metric("exposed_communication_s", "s", "time_s", "exposed_communication"),
        # All computation: what is hidden moves between the two parts, and is computed all the same.
        Metric("compute_s", (("time_s", "compute_only"), ("time_s", "overlapped")), "s", Worse.HIGHER),
        _metric("overlap_fraction", "", worse=Worse.LOWER),
        _metric("peak_allocated_bytes", "B", "peak_memory_bytes", "allocated"),
        _metric("peak_active_bytes", "B", "peak_memory_bytes", "active"),
        _metric("peak_reserved_bytes", "B", "peak_memory_bytes", "reserved"),
        _metric("alloc_retries_per_step", ""),
        _metric("ooms", ""),
        *_collective("all_gather"),
        *_collective("reduce_scatter"),
        *_collective("all_reduce"),
        _metric("prefetched_all_gathers", "", "late_all_gathers", "prefetched", worse=Worse.LOWER),
        _metric("late_all_gathers", "", "late_all_gathers", "late"),
        _metric("kernels", "", "work", "kernels"),
        _metric("copies", "", "work", "copies"),
        _metric("limiter_waits", "", "work", "limiter_waits", worse=Worse.NEITHER),
    )
}


def figures_of(result: Mapping[str, Any]) -> dict[str, float | None]:
    """Every metric of `result` by name."""
    return {name: metric.of(result) for name, metric in METRICS.items()}
