"""Optuna over simulated points.

    ask ──> suggested values ──nearest point not tried yet──> run a batch ──> tell ──> ask …

Batches have a fixed size, whatever runs side by side, so that one seed always tries the same points.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fsdpbench.configuration.config import Config
from fsdpbench.tune.front import Candidate
from fsdpbench.tune.point_space import PointSpace, objectives

BATCH = 8
_FIRST = 16
"""Points tried before the sampler has anything to learn from."""
Evaluate = Callable[[Sequence[Config]], list[Candidate]]


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


class _Search:
    def __init__(self, points: Sequence[Config], seed: int) -> None:
        self._space = PointSpace(points)
        self._left = dict.fromkeys(range(len(points)))
        optuna = self._space.optuna
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=_FIRST)
        self._failed = optuna.trial.TrialState.FAIL
        self._study = optuna.create_study(directions=["maximize", "minimize"], sampler=sampler)

    def run(self, trials: int, evaluate: Evaluate) -> list[Candidate]:
        tried: list[Candidate] = []
        for index in self._spread_out():
            self._study.enqueue_trial(self._space.parameters(index))
        while len(tried) < trials and self._left:
            count = min(BATCH, trials - len(tried), len(self._left))
            chosen = [self._next() for _ in range(count)]
            candidates = evaluate([self._space.points[index] for index, _ in chosen])
            for (_, trial), candidate in zip(chosen, candidates, strict=True):
                self._study.tell(trial, objectives(candidate))
            tried += candidates
        return tried

    def _spread_out(self) -> list[int]:
        """The first point of each system: usual settings come first in their lists."""
        firsts: dict[str, int] = {}
        for index, config in enumerate(self._space.points):
            firsts.setdefault(config.system, index)
        return list(firsts.values())

    def _next(self) -> tuple[int, Any]:
        """A point to try and its trial, whose parameters are exactly that point's."""
        asked = self._study.ask(self._space.distributions)
        index = self._space.nearest(asked.params, self._left)
        del self._left[index]
        actual = self._space.parameters(index)
        if actual == asked.params:
            return index, asked
        self._study.tell(asked, state=self._failed)
        self._study.enqueue_trial(actual)
        return index, self._study.ask(self._space.distributions)
