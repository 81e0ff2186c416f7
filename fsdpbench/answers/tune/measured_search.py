"""Optuna over real runs, led by what was simulated before.

    simulated ranking ──its best, in order──> run ─┐
                                                   ▼
    a study of all that is known:   points that ran          as measured
                                    points only simulated    as simulated x how its settings ran so far
                                                   │
                                     ask ──> nearest point that has not run ──> run ──> again

Real runs are few and expensive, so every ask builds on the whole simulated ranking. How a device differs from
the simulation is learned from the points that ran: a factor for all, and one for each value of each setting
(a ridge regression on logarithms, so that a single run moves little). Each measurement takes the place of
what was simulated for its point.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from fsdpbench.answers.tune.front import Candidate
from fsdpbench.answers.tune.point_space import PointSpace, objectives
from fsdpbench.base.configuration.config import Config

_SHRINKAGE = 1.0
_FIRST = 4
"""With fewer points known than this Optuna draws at random."""


@dataclass(frozen=True)
class RealBudget:
    """The bound of real runs: at most `runs` points (None: no bound), none begun after `seconds` of wall
    time; the first `seeds` of them are the best simulated ones."""

    seeds: int
    runs: int | None = None
    seconds: float | None = None

    def allows(self, done: int, elapsed_s: float) -> bool:
        """Return whether another point may be run."""
        return (self.runs is None or done < self.runs) and (self.seconds is None or elapsed_s < self.seconds)


def search_measured(
    points: Sequence[Config],
    simulated: Sequence[Candidate | None],
    seeds: Sequence[int],
    budget: RealBudget,
    seed: int,
    measure: Callable[[Config], Candidate],
    clock: Callable[[], float] = time.monotonic,
) -> dict[int, Candidate]:
    """Run points for real while `budget` allows it: first `seeds` (places in `points`), then what Optuna asks
    for. `simulated` holds what the simulation said of each point; None where it said nothing. Points that it
    found unfit are left out. Returns what was measured by its place, in order.

    Raises `UsageError` if optuna is not installed and would be needed.
    """
    began = clock()
    measured: dict[int, Candidate] = {}
    waiting = list(seeds[: budget.seeds])
    left = dict.fromkeys(index for index, known in enumerate(simulated) if known is None or known.feasible)
    everything = budget.seconds is None and (budget.runs is None or len(left) <= budget.runs)
    asking = None if everything else _Asking(points, simulated, seed)
    while left and budget.allows(len(measured), clock() - began):
        if waiting:
            index = waiting.pop(0)
        else:
            index = next(iter(left)) if asking is None else asking.next(measured, left)
        del left[index]
        measured[index] = measure(points[index])
    return measured


class _Asking:
    def __init__(self, points: Sequence[Config], simulated: Sequence[Candidate | None], seed: int) -> None:
        self._space = PointSpace(points)
        self._simulated = simulated
        self._seed = seed

    def next(self, measured: dict[int, Candidate], left: dict[int, None]) -> int:
        """Return the place of the point to run next."""
        optuna = self._space.optuna
        known = _corrected(self._space, self._simulated, measured)
        with_memory = any(candidate.memory is not None for candidate in measured.values())
        count = 2 if with_memory else 1
        # A new study each time: in one that goes on, what was simulated of a point would stay beside what
        # was measured of it.
        sampler = optuna.samplers.TPESampler(seed=self._seed + len(measured), n_startup_trials=_FIRST)
        study = optuna.create_study(directions=["maximize", "minimize"][:count], sampler=sampler)
        for index, candidate in known.items():
            study.add_trial(
                optuna.trial.create_trial(
                    params=self._space.parameters(index),
                    distributions=self._space.distributions,
                    values=objectives(candidate)[:count],
                )
            )
        asked = study.ask(self._space.distributions).params
        speeds = {index: candidate.speed for index, candidate in known.items() if candidate.feasible}
        usual = median(speeds.values()) if speeds else 0.0
        return self._space.nearest(asked, left, lambda index: speeds.get(index, usual))


def _corrected(
    space: PointSpace, simulated: Sequence[Candidate | None], measured: dict[int, Candidate]
) -> dict[int, Candidate]:
    """Return each point as measured, or as simulated and corrected by what was measured."""
    known = {index: each for index, each in enumerate(simulated) if each is not None}
    pairs = [
        index
        for index, found in measured.items()
        if index in known and found.feasible and known[index].feasible
    ]
    rows = {index: space.one_hot(index) for index in {*known, *pairs}}
    logs = np.array([math.log(measured[index].speed / known[index].speed) for index in pairs])
    overall = float(logs.mean()) if pairs else 0.0
    effects = None
    if pairs:  # ridge regression: weights drawn towards 0 (Hoerl and Kennard, 1970)
        design = np.array([rows[index] for index in pairs])
        effects = np.linalg.solve(
            design.T @ design + _SHRINKAGE * np.eye(design.shape[1]), design.T @ (logs - overall)
        )
    together = dict(measured)
    for index, candidate in known.items():
        if index not in measured:
            own = 0.0 if effects is None else float(rows[index] @ effects)
            together[index] = replace(candidate, speed=candidate.speed * math.exp(overall + own))
    return dict(sorted(together.items()))
