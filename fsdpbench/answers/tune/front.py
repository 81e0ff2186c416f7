"""The goal of a search, and the front of the configurations that nothing beats in speed and memory."""

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
"""What to search for, by the figure of the result that says it; more is better."""


@dataclass(frozen=True)
class Candidate:
    """One configuration that was tried: its speed (the goal's unit) and peak reserved memory (bytes, None
    where the device does not tell). `feasible`: it ran, and within the limit. `interval`: where figures of
    a simulated one really are. `risky`: memory fits only inside its error."""

    config: Config
    status: Status
    speed: float
    memory: int | None
    feasible: bool
    interval: Interval | None = None
    risky: bool = False


@dataclass(frozen=True)
class Goal:
    """The goal: the most of `name` (a key of `GOALS`) within `memory` bytes a GPU."""

    name: str
    memory: int | None = None


def figure_of(goal: str) -> str:
    """Return the figure that `goal` names. Raises `UsageError`."""
    if goal not in GOALS:
        raise unknown("goal", goal, GOALS, "fsdpbench tune --help")
    return GOALS[goal]


def judge(config: Config, result: Result, goal: Goal) -> Candidate:
    """Return what `result` says of `config` for `goal`."""
    trial = Trial(config, result)
    speed, memory, limit = result.at(figure_of(goal.name)) or 0.0, trial.reserved, goal.memory
    fits = limit is None or memory is None or memory <= limit
    feasible = trial.status is Status.OK and fits and speed > 0
    return Candidate(
        config, trial.status, speed, memory, feasible, trial.interval, _is_risky(trial.interval, limit)
    )


def judged(store: Store, config: Config, goal: Goal, *, first: bool = False) -> Candidate:
    """Return what `store` says of `config`; of its first run alone, where a search has to see what it saw the
    first time although it finds results over all runs."""
    results = store.runs(config)
    # A folder removed while the search runs is a point without an answer.
    result = results[0] if results else Result(status=Status.ERROR)
    return judge(config, first_run(result) if first else result, goal)


def _is_risky(interval: Interval | None, limit: int | None) -> bool:
    """Return whether the upper end of what is reserved is more than there is, or than the limit."""
    if interval is None:
        return False
    reserved = interval.peak_memory_bytes.get("reserved")
    return interval.risky or (limit is not None and reserved is not None and reserved[1] > limit)


def ranks(candidates: Sequence[Candidate]) -> list[int | None]:
    """Return the rank of each by speed; those that cannot be distinguished share one."""
    return shared_ranks([cost_of(each.speed, each.interval) if each.speed else None for each in candidates])


def pareto(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the feasible candidates that no other equals in one of speed and memory and beats in the other,
    fastest first; of equals the first."""
    ranked = sorted(
        (candidate for candidate in candidates if candidate.feasible),
        key=lambda candidate: (-candidate.speed, candidate.memory or 0),
    )
    front: list[Candidate] = []
    for candidate in ranked:
        if not front or (candidate.memory or 0) < (front[-1].memory or 0):
            front.append(candidate)
    return front
