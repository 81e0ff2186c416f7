"""Warming up: until steps have settled, or a bound is reached, and said which.

The first steps of a real run pay for lazy initialisation, caches and clocks that rise. How many do is not
known beforehand: stable is what varies little over the last few steps. Every rank sees the same times (those
of the slowest rank), so every rank stops at the same step.

A simulated step is exact, and settled immediately, unless memory is nearly full: then the allocator may retry
for several steps until its segments fit what the steps need, or continue doing so. Its device says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from fsdpbench.configuration.config import Measurement

WINDOW = 3
TOLERANCE = 0.05
"""Stable: the last `WINDOW` steps are within this share of their median."""


@dataclass(frozen=True)
class WarmUp:
    """What the warm-up took (seconds a step); `stable` is None where it was not asked for."""

    times_s: list[float]
    stable: bool | None

    def steps_to_time(self, measurement: Measurement) -> int:
        """More of them where one step does not say what the next will be like."""
        more = measurement.most_timed_steps if self.stable is False else 0
        return max(measurement.timed_steps, more)


def is_stable(times_s: Sequence[float]) -> bool:
    """Whether the last steps differ by no more than `TOLERANCE`."""
    last = times_s[-WINDOW:]
    return len(last) == WINDOW and max(last) - min(last) <= TOLERANCE * median(last)


def warm_up(
    measurement: Measurement,
    timed_step: Callable[[], float],
    has_settled: Callable[[Sequence[float]], bool] = is_stable,
) -> WarmUp:
    """Run warm-up steps. `timed_step` runs one and returns its seconds, the same on every rank; `has_settled`
    tells from the times so far whether more are needed."""
    times = [timed_step() for _ in range(measurement.warmup_steps)]
    if measurement.most_warmup_steps <= measurement.warmup_steps:
        return WarmUp(times, None)
    while not has_settled(times) and len(times) < measurement.most_warmup_steps:
        times.append(timed_step())
    return WarmUp(times, has_settled(times))
