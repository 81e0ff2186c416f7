"""The figures that the gate compares, and which way each of them gets worse.

On `sim` every one of them is exact, so any difference is a change of the code, and the gate allows none
unless `thresholds.toml` says so.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from fsdpbench.errors import UsageError


class Worse(Enum):
    """The direction in which a figure gets worse."""

    HIGHER = "higher"
    LOWER = "lower"


@dataclass(frozen=True)
class Metric:
    """A figure of a result: where it lies in `result.json`, its unit, and which way is worse."""

    name: str
    path: tuple[str, ...]
    unit: str
    worse: Worse

    def of(self, result: Mapping[str, Any]) -> float | None:
        """The figure in `result`; `None` where it is not known."""
        value: Any = result
        for key in self.path:
            if not isinstance(value, Mapping):
                return None
            value = value.get(key)
        return value if isinstance(value, int | float) else None


def _metric(name: str, unit: str, *path: str, worse: Worse = Worse.HIGHER) -> Metric:
    return Metric(name, path or (name,), unit, worse)


def _collective(kind: str) -> tuple[Metric, ...]:
    return (
        _metric(f"{kind}_count", "", "communication", kind, "count"),
        _metric(f"{kind}_bytes", "B", "communication", kind, "bytes"),
    )


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        _metric("step_time_s", "s"),
        _metric("exposed_communication_s", "s", "time_s", "exposed_communication"),
        _metric("compute_s", "s", "time_s", "compute_only"),
        _metric("overlap_fraction", "", worse=Worse.LOWER),
        _metric("peak_allocated_bytes", "B", "peak_memory_bytes", "allocated"),
        _metric("peak_active_bytes", "B", "peak_memory_bytes", "active"),
        _metric("peak_reserved_bytes", "B", "peak_memory_bytes", "reserved"),
        _metric("alloc_retries_per_step", ""),
        _metric("ooms", ""),
        *_collective("all_gather"),
        *_collective("reduce_scatter"),
        *_collective("all_reduce"),
    )
}


def figures_of(result: Mapping[str, Any]) -> dict[str, float | None]:
    """Every metric of `result` by name."""
    return {name: metric.of(result) for name, metric in METRICS.items()}


def read_thresholds(path: Path | None) -> dict[str, float]:
    """Relative change allowed a metric (0.01: one per cent), by name. None given: none allowed. Raises
    `UsageError`."""
    if path is None:
        return {}
    try:
        content = tomllib.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path}: is not TOML ({error})") from None
    allowed = content.get("relative_change", {})
    for name, value in allowed.items():
        if name not in METRICS:
            raise UsageError(f"{path}: relative_change.{name} is no metric; known: {', '.join(METRICS)}")
        if not isinstance(value, int | float) or value < 0:
            raise UsageError(f"{path}: relative_change.{name} must be a number from 0 up, not {value!r}")
    return dict(allowed)
