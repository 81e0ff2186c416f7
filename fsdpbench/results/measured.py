"""How a step time was measured: its raw samples, their spread, the warm-up, and what the profiler cost.

`spread` is the distance of the quartiles as a share of the median, which one slow step does not decide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median, quantiles
from typing import Any


def measured(records: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The samples of the slowest rank (seconds). None where nothing was timed."""
    timed = [record for record in records if record.get("step_times_s")]
    if not timed:
        return None
    slowest = max(timed, key=lambda record: median(record["step_times_s"]))
    samples, profiled = slowest["step_times_s"], slowest.get("profiler_step_times_s") or []
    return {
        "step_times_s": samples,
        "spread": spread(samples),
        "warmup_times_s": slowest.get("warmup_times_s") or [],
        "warmup_stable": slowest.get("warmup_stable"),
        "profiler_overhead": median(profiled) / median(samples) - 1 if profiled else None,
    }


def spread(samples: Sequence[float]) -> float | None:
    """Distance of the quartiles as a share of the median. None for a single sample."""
    if len(samples) < 2:
        return None
    low, _, high = quantiles(samples, n=4, method="inclusive")
    return (high - low) / median(samples)
