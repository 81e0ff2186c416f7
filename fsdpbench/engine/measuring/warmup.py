"""Warming up: until steps have settled, or a bound is reached, and said which.

The first steps of a real run pay for lazy initialisation, caches and clocks that rise. How many do is not
known beforehand: stable is what varies little over the last few steps. Every rank sees the same times (those
of the slowest rank), so every rank stops at the same step.

A simulated step is exact, and settled immediately, unless memory is nearly full: then the allocator may retry
for several steps until its segments fit what the steps need, or continue doing so. Its device says so. Steps
that retry are never called stable, however alike the last ones were: the next one may find other segments.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Protocol

from fsdpbench.base.configuration.config import Measurement

WINDOW = 3
TOLERANCE = 0.05
"""Stable: the last `WINDOW` steps are within this share of their median."""


@dataclass(frozen=True)
class StepMemory:
    """Peaks of one step in bytes, and what the allocator had to do in it. `device_allocs`: cudaMallocs;
    `inactive_split`: free bytes at its end that are between others (fragments)."""

    allocated: int
    active: int
    reserved: int
    alloc_retries: int
    ooms: int
    device_allocs: int = 0
    inactive_split: int = 0


@dataclass
class TimedSteps:
    """Runs steps; keeps the seconds of each, the same on every rank, and this rank's memory in it."""

    timed_step: Callable[[], float]
    take_memory: Callable[[], StepMemory | None]
    times_s: list[float] = field(default_factory=list)
    memory: list[StepMemory | None] = field(default_factory=list)

    def run(self) -> float:
        self.times_s.append(self.timed_step())
        self.memory.append(self.take_memory())
        return self.times_s[-1]

    def run_many(self, count: int) -> None:
        for _ in range(count):
            self.run()

    def retried(self, last: int) -> bool:
        """Return whether the allocator retried in one of the `last` steps."""
        return any(memory is not None and memory.alloc_retries > 0 for memory in self.memory[-last:])


@dataclass(frozen=True)
class WarmUp:
    """Duration of the warm-up (seconds a step); `stable` is None unless steps had to settle."""

    times_s: list[float]
    stable: bool | None


def is_stable(times_s: Sequence[float]) -> bool:
    """Return whether the last steps differ by no more than `TOLERANCE`."""
    last = times_s[-WINDOW:]
    return len(last) == WINDOW and max(last) - min(last) <= TOLERANCE * median(last)


def warm_up(
    measurement: Measurement,
    timed_step: Callable[[], float],
    has_settled: Callable[[Sequence[float]], bool] = is_stable,
    retried: Callable[[int], bool] = lambda last: False,
) -> WarmUp:
    """Run warm-up steps. `timed_step` runs one and returns its seconds, the same on every rank; `has_settled`
    tells from the times so far whether more are needed, `retried` whether the allocator did in so many last
    steps."""
    times = [timed_step() for _ in range(measurement.warmup_steps)]
    if measurement.most_warmup_steps <= measurement.warmup_steps:
        return WarmUp(times, False if retried(WINDOW) else None)
    while not has_settled(times) and len(times) < measurement.most_warmup_steps:
        times.append(timed_step())
    return WarmUp(times, has_settled(times) and not retried(WINDOW))


def time_steps(
    measurement: Measurement, warm: WarmUp, steps: TimedSteps, run: Callable[[int], None] | None = None
) -> WarmUp:
    """Run the timed steps; the warm-up, found not to be stable where one of them retried. `run` runs so many
    of `steps` (default: and does nothing else).

    Ranks that measure all take as many: `most_timed_steps` is of simulated runs, whose rank 0 runs alone.
    """
    more = measurement.most_timed_steps if warm.stable is False else 0
    run, wanted = run or steps.run_many, max(measurement.timed_steps, more)
    run(wanted)
    if not steps.retried(wanted):
        return warm
    more = measurement.most_timed_steps - wanted
    if more > 0:
        run(more)
    return WarmUp(warm.times_s, stable=False)


class Tracer(Protocol):
    """A trace being recorded: marker of the end of each step, as `torch.profiler.profile.step`."""

    def step(self) -> object: ...


class Traces(Protocol):
    """The part of a device that traced steps use."""

    @property
    def tracing_is_free(self) -> bool: ...

    def timed_step(self, step: Callable[[], object]) -> float: ...

    def trace(self, path: Path) -> AbstractContextManager[Tracer]: ...


def time_and_trace(
    measurement: Measurement,
    warm: WarmUp,
    steps: TimedSteps,
    device: Traces,
    step: Callable[[], object],
    path: Path,
    profiled_s: list[float],
) -> WarmUp:
    """Run the timed steps; write the trace of the last steps to `path` if any are to be traced.

        two passes    timed timed timed | traced traced      a profiler makes real steps longer
        one pass      timed timed timed                      on a device where tracing takes no time
                            traced traced

    Return the warm-up as `time_steps` does. Seconds of steps that a profiler slows go into `profiled_s`.
    """
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
    count: int, traced: int, steps: TimedSteps, device: Traces, step: Callable[[], object], path: Path
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
