"""Repetitions of a configuration: the run is the replicate, and a step only a sample within it.

Steps of one run share what that run happened to get (its processes' places, the clocks, the page cache), so
that the spread between runs is the one that counts. Runs of all configurations are interleaved, every second
round backwards, so that a drift of the machine meets all of them alike:

    round 1   A B C      round 2   C B A      round 3   A B C
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from fsdpbench.base.configuration.config import Config
from fsdpbench.reports.figures import FIGURES
from fsdpbench.reports.result import Repeats, Result, Status
from fsdpbench.reports.result_figures import spread


@dataclass(frozen=True)
class Run:
    """The `number`-th run of a configuration, from 1."""

    config: Config
    number: int = 1


def interleaved(points: Sequence[Config], repeat: int) -> list[Run]:
    """Every run of every point in the order in which they take place."""
    runs: list[Run] = []
    for number in range(1, repeat + 1):
        order = points if number % 2 else tuple(reversed(points))
        runs += [Run(config, number) for config in order]
    return runs


def merged(first: Result, others: Sequence[Result]) -> Result:
    """Return the result of a configuration over all of its runs, on top of that of its first one.

    `step_time_s` becomes the median over runs, rates follow it; everything else stays the first run's.
    `repeats` keeps each run's step time and samples. May be applied to its own output again.
    """
    earlier, step = first.repeats, _step(first)
    own_step = earlier.step_time_s[0] if earlier else step
    own_samples = earlier.samples_s[0] if earlier else first.step_times_s
    succeeded = [result for result in others if result.status is Status.OK]
    steps = [own_step, *(_step(result) for result in succeeded)]
    together = median(steps)
    repeats = Repeats(
        runs=len(others) + 1,
        failed=len(others) - len(succeeded),
        step_time_s=steps,
        spread=spread(steps),
        samples_s=[own_samples, *(result.step_times_s for result in succeeded)],
    )
    return first.replaced(**_rates(first, step / together), step_time_s=together, repeats=repeats)


def first_run(result: Result) -> Result:
    """Return the result as it was after the first run alone: `merged` undone for step time and rates."""
    if not result.repeats:
        return result
    own = result.repeats.step_time_s[0]
    return result.replaced(**_rates(result, _step(result) / own), step_time_s=own, repeats=None)


def _rates(result: Result, scale: float) -> dict[str, float]:
    """Return the rates that are known, times `scale`."""
    known = ((figure.path, figure.of(result)) for figure in FIGURES if figure.is_rate)
    return {path: value * scale for path, value in known if value is not None}


def _step(result: Result) -> float:
    assert result.step_time_s is not None  # of what ended well
    return result.step_time_s
