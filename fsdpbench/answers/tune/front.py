"""The goal of a search, and the Pareto front of speed and memory."""

from collections.abc import Sequence
from dataclasses import dataclass

from fsdpbench.base.configuration.config import Config
from fsdpbench.base.errors import unknown
from fsdpbench.engine.results.records import Status
from fsdpbench.engine.results.store import Store
from fsdpbench.reports.pages.ranking import cost_of, shared_ranks
from fsdpbench.reports.result import Interval, Result
from fsdpbench.sweep.runner import first_run
from fsdpbench.sweep.trials import Trial

GOALS = {
    "tokens_per_s": "tokens_per_s_per_gpu",
    "samples_per_s": "samples_per_s_per_gpu",
    "tflops": "tflops_per_gpu",
    "mfu": "mfu",
}
"""The figure of the result for each goal; more is better."""


@dataclass(frozen=True)
class Candidate:
    """One configuration that was tried: its speed (in the goal's unit) and peak reserved memory (bytes, None
    if the device does not report it). `feasible`: it ran within the limit. `interval`: prediction interval of
    a simulated one. `risky`: memory fits only within its prediction error."""

    config: Config
    status: Status
    speed: float
    memory: int | None
    feasible: bool
    interval: Interval | None = None
    risky: bool = False


@dataclass(frozen=True)
class Goal:
    """The goal: maximise `name` (a key of `GOALS`) within `memory` bytes per GPU."""

    name: str
    memory: int | None = None


def figure_of(goal: str) -> str:
    """Return the figure for `goal`. Raises `UsageError` if it is unknown."""
    if goal not in GOALS:
        raise unknown("goal", goal, GOALS, "fsdpbench tune --help")
    return GOALS[goal]


def judge(config: Config, result: Result, goal: Goal) -> Candidate:
    """Return the candidate of `config` with its `result`, judged by `goal`."""
    trial = Trial(config, result)
    speed, memory, limit = result.at(figure_of(goal.name)) or 0.0, trial.reserved, goal.memory
    fits = limit is None or memory is None or memory <= limit
    feasible = trial.status is Status.OK and fits and speed > 0
    return Candidate(
        config, trial.status, speed, memory, feasible, trial.interval, _is_risky(trial.interval, limit)
    )


def judged(store: Store, config: Config, goal: Goal, *, first: bool = False) -> Candidate:
    """Return the candidate of `config` with its result in `store`. With `first`, use only the first run, so
    that a resumed search sees the same results as before although more runs exist."""
    results = store.runs(config)
    # If its folder was removed during the search, the point has no result.
    result = results[0] if results else Result(status=Status.ERROR)
    return judge(config, first_run(result) if first else result, goal)


def _is_risky(interval: Interval | None, limit: int | None) -> bool:
    """Return whether the upper end of reserved memory exceeds the GPU's memory or the limit."""
    if interval is None:
        return False
    reserved = interval.peak_memory_bytes.get("reserved")
    return interval.risky or (limit is not None and reserved is not None and reserved[1] > limit)


def ranks(candidates: Sequence[Candidate]) -> list[int | None]:
    """Return the rank of each candidate by speed; indistinguishable ones share a rank."""
    return shared_ranks([cost_of(each.speed, each.interval) if each.speed else None for each in candidates])


def pareto(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the Pareto front of speed and memory among the feasible candidates, fastest first; of equal
    candidates only the first."""
    ranked = sorted(
        (candidate for candidate in candidates if candidate.feasible),
        key=lambda candidate: (-candidate.speed, candidate.memory or 0),
    )
    front: list[Candidate] = []
    for candidate in ranked:
        if not front or (candidate.memory or 0) < (front[-1].memory or 0):
            front.append(candidate)
    return front
