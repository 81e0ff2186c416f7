"""Timed steps and traced ones: two passes, or one on a device where tracing takes no time.

two passes    timed timed timed | traced traced      a profiler makes real steps longer
one pass      timed timed timed                      the last timed steps are the traced ones
                    traced traced
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from fsdpbench.configuration.config import Measurement
from fsdpbench.measuring.warmup import Memory, TimedSteps, WarmUp, time_steps


class MarksSteps(Protocol):
    """A trace that is being taken."""

    def step(self) -> object: ...


class Traces(Protocol):
    """What of a device is needed here."""

    @property
    def tracing_is_free(self) -> bool: ...

    def timed_step(self, step: Callable[[], object]) -> float: ...

    def trace(self, path: Path) -> AbstractContextManager[MarksSteps]: ...


def time_and_trace(
    measurement: Measurement,
    warm: WarmUp,
    steps: TimedSteps[Memory],
    device: Traces,
    step: Callable[[], object],
    path: Path,
    profiled_s: list[float],
) -> WarmUp:
    """Run the timed steps, and leave the trace of the last steps in `path` if any are to be traced; the
    warm-up as `time_steps` returns it. Seconds of steps under a profiler that makes them longer go into
    `profiled_s`."""
    traced = measurement.traced_steps
    if traced:
        path.parent.mkdir(parents=True, exist_ok=True)
    if traced and device.tracing_is_free:
        return time_steps(
            measurement, warm, steps, lambda n: _run_traced(n, traced, steps, device, step, path)
        )
    warm = time_steps(measurement, warm, steps)
    if traced:
        with device.trace(path) as tracer:
            for _ in range(traced):
                profiled_s.append(device.timed_step(step))
                tracer.step()
    return warm


def _run_traced(
    count: int,
    traced: int,
    steps: TimedSteps[Memory],
    device: Traces,
    step: Callable[[], object],
    path: Path,
) -> None:
    """Time `count` steps, the last `traced` of them under the trace; if there are fewer, more are traced. A
    later call writes the trace again: it is then that of the last timed steps."""
    for _ in range(count - traced):
        steps.run()
    with device.trace(path) as tracer:
        for _ in range(min(count, traced)):
            steps.run()
            tracer.step()
        for _ in range(traced - count):
            device.timed_step(step)
            tracer.step()
