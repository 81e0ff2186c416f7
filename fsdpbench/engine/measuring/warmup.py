"""Warm-up: run steps until their time is stable or a maximum is reached, and report which.

The first steps of a real run are slower because of lazy initialization, cold caches and rising clocks. The
number of warm-up steps is not known in advance. Steps count as stable when the last few vary little. All
ranks see the same times (the slowest rank's), so all stop at the same step.

Simulated steps are exact, and stable immediately, unless memory is nearly full: then the allocator may retry
for several steps until its segments fit, or forever. The device's `has_settled` checks that. Steps with
retries never count as stable, even if their times are equal: the next step may find other segments.
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
"""Steps are stable if the times of the last `WINDOW` differ by at most this share of their median."""


@dataclass(frozen=True)
class StepMemory:
    """Peak bytes and allocator events of one step. `device_allocs`: number of cudaMallocs;
    `inactive_split`: free bytes in partly used segments at its end (fragmentation)."""

    allocated: int
    active: int
    reserved: int
    alloc_retries: int
    ooms: int
    device_allocs: int = 0
    inactive_split: int = 0


@dataclass
class TimedSteps:
    """Runs steps, and records the seconds (the same on all ranks) and this rank's memory of each."""

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
        """Return whether the allocator retried in any of the last `last` steps."""
        return any(memory is not None and memory.alloc_retries > 0 for memory in self.memory[-last:])


@dataclass(frozen=True)
class WarmUp:
    """The seconds of each warm-up step; `stable` is None if stability was not required."""

    times_s: list[float]
    stable: bool | None


def is_stable(times_s: Sequence[float]) -> bool:
    """Return whether the times of the last `WINDOW` steps differ by at most `TOLERANCE` of their median."""
    last = times_s[-WINDOW:]
    return len(last) == WINDOW and max(last) - min(last) <= TOLERANCE * median(last)


def warm_up(
    measurement: Measurement,
    timed_step: Callable[[], float],
    has_settled: Callable[[Sequence[float]], bool] = is_stable,
    retried: Callable[[int], bool] = lambda last: False,
) -> WarmUp:
    """Run warm-up steps. `timed_step` runs one and returns its seconds, the same on every rank. `has_settled`
    decides from all times whether to stop. `retried(n)` returns whether the allocator retried in the last n
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
    """Run the timed steps; return the warm-up, marked as not stable if the allocator retried in one of them.
    `run(n)` runs n of `steps` (default: `steps.run_many`).

    All ranks time the same number of steps: `most_timed_steps` is only for `sim`, where rank 0 runs alone.
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
    """A trace that is being recorded; call `step` after each step, as with `torch.profiler.profile`."""

    def step(self) -> object: ...


class Traces(Protocol):
    """The methods of a device that traced steps use."""

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
    """Run the timed steps; write a trace of the last steps to `path` if `traced_steps` is not 0.

        two passes    timed timed timed | traced traced      a profiler slows real steps down
        one pass      timed timed timed                      on a device where tracing takes no time
                            traced traced

    Return the warm-up as `time_steps` does. Append the seconds of separately traced steps to `profiled_s`.
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
    """Time `count` steps and trace the last `traced` of them; if there are fewer, trace additional steps. A
    second call overwrites the trace, which then shows the last timed steps."""
    for _ in range(count - traced):
        steps.run()
    with device.trace(path) as tracer:
        for _ in range(min(count, traced)):
            steps.run()
            tracer.step()
        for _ in range(traced - count):
            device.timed_step(step)
            tracer.step()
