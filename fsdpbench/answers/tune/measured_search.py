"""Search with Optuna over the points of a plan, and over real runs guided by the simulated ranking.

Optuna sees one categorical parameter for each field in which points differ. The space is the list of
`fsdpbench plan`, which already applies conditions and leaves out inapplicable points. If a suggestion is not
one of these points, the nearest point is used.

    simulated ranking ──best points, in order──> run ─┐
                                                      ▼
    a study of all known points:    points that ran          measured values
                                    points only simulated    simulated values x correction for its settings
                                                      │
                                     ask ──> nearest point that has not run ──> run ──> repeat

Real runs are few and expensive, so every ask uses the whole simulated ranking. The points that ran determine
how the device differs from the simulation: one factor for all points, and one for each value of each setting
(a ridge regression on logarithms, so that a single run changes little). Each measurement replaces the
simulated value of its point.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from fsdpbench.answers.tune.front import Candidate
from fsdpbench.base.configuration.config import Config
from fsdpbench.base.errors import UsageError, error_text
from fsdpbench.base.settings import Value

UNFIT = (0.0, 1e15)
"""Speed and memory of points that failed or exceeded the limit: worse than any feasible point."""
_SHRINKAGE = 1.0
_FIRST = 4
"""With fewer known points than this, Optuna samples at random."""


class PointSpace:
    """`points` encoded as Optuna parameters. Raises `UsageError` if optuna is not installed."""

    def __init__(self, points: Sequence[Config]) -> None:
        self.optuna = _optuna()
        self.points = points
        self._fields: list[dict[str, Value]] = [
            {"system": config.system, "gpus": config.gpus, **config.settings.to_dict()} for config in points
        ]
        values = {
            name: [*{_typed(fields[name]): fields[name] for fields in self._fields}.values()]
            for name in self._fields[0]
        }
        self._values = {name: found for name, found in values.items() if len(found) > 1}
        self.distributions = {
            name: self.optuna.distributions.CategoricalDistribution(range(len(found)))
            for name, found in self._values.items()
        }

    def parameters(self, index: int) -> dict[str, int]:
        """Return a point as Optuna's parameters."""
        fields = self._fields[index]
        return {
            name: [*map(_typed, found)].index(_typed(fields[name])) for name, found in self._values.items()
        }

    def one_hot(self, index: int) -> np.ndarray:
        """Return the one-hot encoding of a point over the values of all fields that vary."""
        places = self.parameters(index)
        parts = [np.eye(len(found))[places[name]] for name, found in self._values.items()]
        row: np.ndarray = np.concatenate(parts) if parts else np.zeros(1)
        return row

    def nearest(
        self,
        parameters: Mapping[str, int],
        among: Iterable[int],
        promise: Callable[[int], float] = lambda index: 0.0,
    ) -> int:
        """Return the point of `among` that differs in the fewest fields; `promise` decides between equals."""
        wanted = {name: self._values[name][parameters[name]] for name in self._values}
        return min(among, key=lambda index: (_distance(self._fields[index], wanted), -promise(index), index))


@dataclass(frozen=True)
class RealBudget:
    """The budget of real runs: at most `runs` points (None: no limit), and none started after `seconds` of
    wall time. The first `seeds` points are the best simulated ones."""

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
    """Run points for real while `budget` allows: first `seeds` (indices in `points`), then suggestions of
    Optuna. `simulated` has the simulated result of each point, or None; points that are infeasible there are
    skipped. Return the measured results by index, in order.

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
        """Return the index of the point to run next."""
        optuna = self._space.optuna
        known = _corrected(self._space, self._simulated, measured)
        with_memory = any(candidate.memory is not None for candidate in measured.values())
        count = 2 if with_memory else 1
        # A new study each time: a continued one would keep the simulated value of a point beside the
        # measured one.
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
    """Return each point as measured, or as simulated and corrected by the measurements."""
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
    if pairs:  # ridge regression: shrinks weights towards 0 (Hoerl and Kennard, 1970)
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


def objectives(candidate: Candidate) -> tuple[float, float]:
    """Return Optuna's objectives: speed and memory."""
    return (candidate.speed, float(candidate.memory or 0)) if candidate.feasible else UNFIT


def _distance(fields: Mapping[str, Value], wanted: Mapping[str, Value]) -> int:
    return sum(_typed(fields[name]) != _typed(value) for name, value in wanted.items())


def _typed(value: Value) -> tuple[type, Value]:
    """Return a setting's value with its type, so that `True` differs from 1."""
    return type(value), value


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise UsageError(error_text("point_space.too_many_points")) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
