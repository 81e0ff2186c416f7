"""Optuna over the points of a plan.

    ask ──> suggested values ──nearest point not tried yet──> run a batch ──> tell ──> ask …

The space stays what `fsdpbench plan` lists: conditions and what is not applicable are decided there, and a
suggestion that is no point of it becomes the nearest one. Batches have a fixed size, whatever runs side by
side, so that one seed always tries the same points.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fsdpbench.config import Config
from fsdpbench.errors import UsageError
from fsdpbench.settings import Value
from fsdpbench.tune.front import Candidate

BATCH = 8
_FIRST = 16
"""Points tried before the sampler has anything to learn from."""
_UNFIT_MEMORY = 1e15
Evaluate = Callable[[Sequence[Config]], list[Candidate]]
Point = Mapping[str, Value]


def search(points: Sequence[Config], trials: int, seed: int, evaluate: Evaluate) -> list[Candidate]:
    """Try at most `trials` of `points`, all of them if there are no more. Returns what was tried, in order.

    Raises `UsageError` if optuna is not installed and would be needed.
    """
    if len(points) <= trials:
        tried: list[Candidate] = []
        for start in range(0, len(points), BATCH):
            tried += evaluate(points[start : start + BATCH])
        return tried
    return _Search(points, seed).run(trials, evaluate)


def fields_of(config: Config) -> dict[str, Value]:
    """What tells points apart: system, world and settings."""
    return {"system": config.system, "gpus": config.gpus, **config.settings.to_dict()}


class _Search:
    def __init__(self, points: Sequence[Config], seed: int) -> None:
        optuna = _optuna()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._left = {index: fields_of(config) for index, config in enumerate(points)}
        self._points = points
        names = list(next(iter(self._left.values())))
        values = {name: _distinct(fields[name] for fields in self._left.values()) for name in names}
        self._values = {name: found for name, found in values.items() if len(found) > 1}
        self._distributions = {
            name: optuna.distributions.CategoricalDistribution(range(len(found)))
            for name, found in self._values.items()
        }
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=_FIRST)
        self._failed = optuna.trial.TrialState.FAIL
        self._study = optuna.create_study(directions=["maximize", "minimize"], sampler=sampler)

    def run(self, trials: int, evaluate: Evaluate) -> list[Candidate]:
        tried: list[Candidate] = []
        for config in self._spread_out():
            self._study.enqueue_trial(self._parameters(fields_of(config)))
        while len(tried) < trials and self._left:
            count = min(BATCH, trials - len(tried), len(self._left))
            chosen = [self._next() for _ in range(count)]
            candidates = evaluate([self._points[index] for index, _ in chosen])
            for (_, trial), candidate in zip(chosen, candidates, strict=True):
                self._study.tell(trial, _objectives(candidate))
            tried += candidates
        return tried

    def _spread_out(self) -> list[Config]:
        """The first point of each system: usual settings come first in their lists."""
        firsts: dict[str, Config] = {}
        for config in self._points:
            firsts.setdefault(config.system, config)
        return list(firsts.values())

    def _next(self) -> tuple[int, Any]:
        """A point to try and its trial, whose parameters are exactly that point's."""
        asked = self._study.ask(self._distributions)
        wanted = {name: self._values[name][asked.params[name]] for name in self._values}
        index = min(self._left, key=lambda i: (_distance(self._left[i], wanted), i))
        actual = self._parameters(self._left.pop(index))
        if actual == asked.params:
            return index, asked
        self._study.tell(asked, state=self._failed)
        self._study.enqueue_trial(actual)
        return index, self._study.ask(self._distributions)

    def _parameters(self, fields: Point) -> dict[str, int]:
        return {name: _place(found, fields[name]) for name, found in self._values.items()}


def _objectives(candidate: Candidate) -> tuple[float, float]:
    if not candidate.feasible:
        return 0.0, _UNFIT_MEMORY
    return candidate.speed, float(candidate.memory or 0)


def _distance(fields: Point, wanted: Point) -> int:
    return sum(not _same(fields[name], value) for name, value in wanted.items())


def _distinct(values: Iterable[Value]) -> list[Value]:
    found: list[Value] = []
    for value in values:
        if not any(_same(value, other) for other in found):
            found.append(value)
    return found


def _place(values: Sequence[Value], value: Value) -> int:
    return next(index for index, other in enumerate(values) if _same(value, other))


def _same(one: Value, other: Value) -> bool:
    """Equal as settings are: `True` is not 1."""
    return one == other and type(one) is type(other)


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise UsageError(
            "the space has more points than --trials, and searching it needs optuna: "
            "pip install 'fsdpbench[tune]', or try all with more --trials"
        ) from None
    return optuna
