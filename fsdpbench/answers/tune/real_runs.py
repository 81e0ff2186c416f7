"""Points of a search that run for real: one after the other, kept as a sweep keeps them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fsdpbench.answers.tune.front import Candidate, Goal, judged
from fsdpbench.base.configuration.config import Config
from fsdpbench.engine.results.store import Store, refresh_index
from fsdpbench.reports.result import Result
from fsdpbench.sweep.runner import run_sweep
from fsdpbench.sweep.trials import PointState, Progress, jobs_for

_LEAST_PAIRS = 3


class RealRuns:
    """Runs points into `store`. `total`: how many at most, for `progress`; None if only time bounds them."""

    def __init__(
        self, store: Store, space: dict[str, object], goal: Goal, progress: Progress, total: int | None = None
    ) -> None:
        self._store = store
        self._space = space
        self._goal = goal
        self._inner = progress
        self._progress = _Continued(progress, total)
        self._points: list[Config] = []

    def measure(self, config: Config) -> Candidate:
        """Run `config`, if it has not run already, and judge its first run."""
        self._points.append(config)
        self._store.write_space(self._space, self._points)
        run_sweep(self._store, [config], self._progress, jobs=jobs_for(config.device), index=False)
        return judged(self._store, config, self._goal, first=True)

    def close(self) -> None:
        """End the display and write the index; call it after the last run."""
        self._progress.close()
        refresh_index(self._store)

    def repeated(self, measured: Sequence[Candidate], repeat: int, contenders: int) -> list[Candidate]:
        """`measured` with the fastest `contenders` run `repeat` times each, interleaved, so that luck in a
        single run does not decide between them."""
        if repeat > 1:
            fastest = sorted((c for c in measured if c.feasible), key=lambda c: -c.speed)[:contenders]
            again = [candidate.config for candidate in fastest]
            if again:
                run_sweep(self._store, again, self._inner, jobs=jobs_for(again[0].device), repeat=repeat)
        return [judged(self._store, candidate.config, self._goal) for candidate in measured]


def rank_agreement(pairs: Sequence[tuple[Candidate | None, Candidate]]) -> float | None:
    """Return Spearman's rank correlation of simulated and measured speeds, over the points that have both.
    None for fewer than three, or where one side has one speed only."""
    both = [(known.speed, found.speed) for known, found in pairs if known is not None and found.feasible]
    if len(both) < _LEAST_PAIRS or any(len(set(side)) < 2 for side in zip(*both, strict=True)):
        return None
    from scipy.stats import spearmanr

    return float(spearmanr(*zip(*both, strict=True)).statistic)


class _Continued(Progress):
    """Many short sweeps shown as one. What is found done comes first: a search takes the same way again."""

    def __init__(self, inner: Progress, total: int | None) -> None:
        self._inner = inner
        self._total = total
        self._known = 0
        self._begun = False

    def begin(self, total: int, already_done: int) -> None:
        self._known += already_done

    def started(self, config: Config) -> None:
        self._begin()
        self._inner.started(config)

    def finished(self, config: Config, result: Result) -> None:
        self._inner.finished(config, result)

    def tick(self, states: Callable[[], list[PointState]]) -> None:
        self._inner.tick(states)

    def end(self) -> None: ...

    def close(self) -> None:
        self._begin()
        self._inner.end()

    def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            self._inner.begin(self._total or 0, self._known)
