"""A search from its plan to its answer, in one folder, from which an interrupted search resumes.

search/     every simulated point, untraced ──────────────────────────── ranks ─┐
<config>/   simulated devices: full runs of the best points  <──────────────────┤
            real devices: the best points, then suggestions of Optuna  <────────┘

Both write tune.json, best.toml and snippets.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from fsdpbench.answers.tune.front import Candidate, Goal, judged, pareto, ranks
from fsdpbench.answers.tune.measured_search import PointSpace, RealBudget, objectives, search_measured
from fsdpbench.answers.tune.per_unit import Chosen, choose, is_safe
from fsdpbench.answers.tune.unit_gain import UnitGain, gained
from fsdpbench.base.configuration.config import Config
from fsdpbench.base.errors import BenchError, error_text
from fsdpbench.base.files.documents import to_json, to_toml
from fsdpbench.base.settings import show_value
from fsdpbench.base.writing import write_whole
from fsdpbench.engine.results.provenance import content_key, nodes_of
from fsdpbench.engine.results.store import Store, refresh_index
from fsdpbench.reports.result import Result
from fsdpbench.sweep.prediction import as_simulated, cannot_fit
from fsdpbench.sweep.runner import run_sweep
from fsdpbench.sweep.snippets import snippets
from fsdpbench.sweep.trials import PointState, Progress, jobs_for

BEST_FILE = "best.toml"
RECORD_FILE = "tune.json"
_CONTENDERS = 4
"""Number of fastest configurations that `repeat` runs again."""


@dataclass(frozen=True)
class Effort:
    """How much to try: `trials` simulated points, then full runs of the best `finalists`. On real devices
    these are the first of `real_runs` real runs (None: as many as finalists), none started after
    `real_seconds`; the best are run `repeat` times. `per_unit`: also choose recomputation and resharding per
    unit."""

    trials: int = 160
    finalists: int = 8
    real_runs: int | None = None
    real_seconds: float | None = None
    repeat: int = 1
    per_unit: bool = False

    @property
    def real(self) -> RealBudget:
        """Return the budget of real runs."""
        runs = self.real_runs
        if runs is None and self.real_seconds is None:
            runs = self.finalists
        return RealBudget(self.finalists, runs, self.real_seconds)


@dataclass(frozen=True)
class Answer:
    """The Pareto front after full runs, fastest first; how many points were simulated, and how many of those
    were feasible. `measured`: number of points run for real; `agreement`: Spearman's rank correlation of
    their measured and simulated order (None if too few were measured)."""

    front: tuple[Candidate, ...]
    tried: int
    feasible: int
    measured: int = 0
    agreement: float | None = None
    per_unit: UnitGain | None = None

    @property
    def best(self) -> Config:
        """Return the recommended configuration: the fastest, or the one that `per_unit` recommends."""
        return self.per_unit.recommended if self.per_unit else self.front[0].config


def tune(
    store: Store,
    space: dict[str, object],
    points: Sequence[Config],
    goal: Goal,
    effort: Effort,
    *,
    seed: int,
    progress: Progress,
    tell: Callable[[str], None],
) -> Answer:
    """Search `points` on simulated GPUs, run the best in full on their own device and write the answer.

    `progress` shows the full runs; `tell` gets status lines. The caller holds the store's lock. Raises
    `BenchError` if no point that was tried is feasible.
    """
    store.write_space(space, [])
    origin = {
        content_key(changed): place
        for place, config in enumerate(points)
        if (changed := as_simulated(config)) is not None
    }
    tried, chosen = _simulate(store, space, points, goal, effort, seed, tell)
    if chosen is not None:
        answer = _by_unit(store, space, points, tried, chosen, goal, effort, progress)
    elif points[0].device == "sim":
        best = [points[origin[content_key(c.config)]] for c in pareto(tried)[: effort.finalists]]
        if not best:
            raise BenchError(_nothing_fits(tried, goal))
        front = _run_in_full(store, space, best, goal, progress)
        answer = Answer(front, len(tried), _feasible(tried))
    else:
        simulated: list[Candidate | None] = [None] * len(points)
        for candidate in tried:
            simulated[origin[content_key(candidate.config)]] = candidate
        seeds = [origin[content_key(c.config)] for c in _ranked(tried)]
        bound = None if effort.real.runs is None else min(effort.real.runs, len(points))
        real = RealRuns(store, space, goal, progress, bound)
        measured = search_measured(points, simulated, seeds, effort.real, seed, real.measure)
        real.close()
        front = tuple(pareto(real.repeated(list(measured.values()), effort.repeat, _CONTENDERS)))
        pairs = [(simulated[place], found) for place, found in measured.items()]
        answer = Answer(front, len(tried), _feasible(tried), len(measured), rank_agreement(pairs))
        if not measured:
            raise BenchError(_nothing_fits(tried, goal))
    if not answer.front:
        raise BenchError(f"none of the best configurations ran within the limit; see {store.folder}")
    _write(store.folder, answer, goal)
    return answer


def _by_unit(
    store: Store,
    space: Mapping[str, object],
    points: Sequence[Config],
    tried: Sequence[Candidate],
    chosen: Chosen,
    goal: Goal,
    effort: Effort,
    progress: Progress,
) -> Answer:
    """Run the per-unit choice in full, together with the uniform configurations that surely fit."""

    def in_full(found: Candidate) -> Candidate:
        return replace(found, config=replace(found.config, measurement=points[0].measurement))

    uniform = chosen.uniform and in_full(chosen.uniform)
    both = replace(chosen, uniform=uniform, by_unit=in_full(chosen.by_unit))
    others = pareto([each for each in tried if is_safe(each)])[: effort.finalists]
    found = [both.by_unit, *([both.uniform] if both.uniform else []), *map(in_full, others)]
    configs = list({content_key(each.config): each.config for each in found}.values())
    front, gain = _run_in_full(store, space, configs, goal, progress), gained(store.folder, both)
    if all(each.config != gain.recommended for each in front):
        front = tuple(sorted((*front, judged(store, gain.recommended, goal)), key=lambda each: -each.speed))
    return Answer(front, len(tried), _feasible(tried), per_unit=gain)


def _simulate(
    store: Store,
    space: dict[str, object],
    points: Sequence[Config],
    goal: Goal,
    effort: Effort,
    seed: int,
    tell: Callable[[str], None],
) -> tuple[list[Candidate], Chosen | None]:
    """Search on simulated GPUs. Return the candidates in order, and the per-unit choice if requested."""
    simulated = [changed for config in points if (changed := as_simulated(config)) is not None]
    if points[0].device != "cpu":
        simulated = _with_room(simulated, tell)
    searching = Store.open_or_create(store.folder / "search")
    searching.write_space(space, simulated)
    done = 0

    def evaluate(batch: Sequence[Config]) -> list[Candidate]:
        nonlocal done
        run_sweep(searching, batch, Progress(), jobs=jobs_for("sim"), index=False)
        done += len(batch)
        count = min(effort.trials, len(simulated))
        tell(f"{done} of {count} simulated" if done <= count else f"{done - count} simulated by unit")
        return [judged(searching, config, goal) for config in batch]

    with searching.locked():
        tried = search(simulated, effort.trials, seed, evaluate)
        return tried, choose(tried, evaluate, goal.memory) if effort.per_unit else None


def _with_room(simulated: Sequence[Config], tell: Callable[[str], None]) -> list[Config]:
    """Remove the points that cannot fit by arithmetic. Raises `BenchError` if none is left."""
    reasons = [cannot_fit(config) for config in simulated]
    left = [config for config, reason in zip(simulated, reasons, strict=True) if reason is None]
    if simulated and not left:
        raise BenchError(f"none of the {len(simulated)} points fits; {reasons[0]}: more GPUs may")
    if len(left) < len(simulated):
        hopeless = len(simulated) - len(left)
        tell(f"{hopeless} of {len(simulated)} points cannot fit by arithmetic: not simulated")
    return left


def _run_in_full(
    store: Store, space: Mapping[str, object], chosen: list[Config], goal: Goal, progress: Progress
) -> tuple[Candidate, ...]:
    """Run the chosen points on simulated GPUs with their traces; return the front."""
    store.write_space(space, chosen)
    run_sweep(store, chosen, progress, jobs=jobs_for("sim"))
    return tuple(pareto([judged(store, config, goal) for config in chosen]))


def _ranked(tried: Sequence[Candidate]) -> list[Candidate]:
    """Return the feasible candidates: the front, fastest first, then the rest by speed."""
    front = pareto(tried)
    keys = {content_key(candidate.config) for candidate in front}
    rest = sorted((c for c in tried if c.feasible), key=lambda candidate: -candidate.speed)
    return front + [candidate for candidate in rest if content_key(candidate.config) not in keys]


def _feasible(tried: Sequence[Candidate]) -> int:
    return sum(candidate.feasible for candidate in tried)


def _nothing_fits(tried: Sequence[Candidate], goal: Goal) -> str:
    memories = [candidate.memory for candidate in tried if candidate.memory is not None]
    if goal.memory is not None and memories:
        least = min(memories) / 1e9
        return f"nothing of {len(tried)} fits into {goal.memory / 1e9:g} GB; the least needs {least:.1f} GB"
    return error_text("run.nothing_fits", len(tried))


def _write(folder: Path, answer: Answer, goal: Goal) -> None:
    best = answer.best
    for outdated in folder.glob("best_*.py"):
        outdated.unlink()
    for name, source in snippets([best, *(candidate.config for candidate in answer.front)]).items():
        write_whole(folder / name, source)
    write_whole(folder / BEST_FILE, to_toml(one_point_space(best)))
    record = {
        "schema": 1,
        "goal": goal.name,
        "memory_limit_bytes": goal.memory,
        "tried": answer.tried,
        "feasible": answer.feasible,
        "simulated": best.device == "sim",
        "measured": answer.measured,
        "rank_agreement": answer.agreement,
        "best": best.name,
        **({} if answer.per_unit is None else {"per_unit": answer.per_unit.to_dict()}),
        "front": [
            {
                "name": each.config.name,
                "rank": place,
                "speed": each.speed,
                "peak_reserved_bytes": each.memory,
                "risky": each.risky,
                "interval": msgspec.to_builtins(each.interval),
            }
            for each, place in zip(answer.front, ranks(answer.front), strict=True)
        ],
    }
    write_whole(folder / RECORD_FILE, to_json(record, 1) + "\n")


def one_point_space(config: Config) -> dict[str, object]:
    """Return `config` as a space of one point, so that `fsdpbench sweep best.toml` can run it again."""
    settings = config.settings.to_dict()
    return {
        "model": config.model,
        "shape": ",".join(f"{n}={show_value(v)}" for n, v in config.shape_given.items()) or None,
        "system": [config.system],
        "device": config.device,
        "hardware": config.hardware,
        "software": config.software,
        "gpus": config.gpus,
        **nodes_of(config),
        "data": config.data,
        "settings": {name: value for name, value in settings.items() if value is not None},
    }


# Optuna over simulated points.
#     ask ──> suggested values ──nearest point not tried yet──> run a batch ──> tell ──> ask …
# Batches have a fixed size, independent of parallelism, so that a seed always tries the same points.

BATCH = 8
_FIRST = 16
"""Number of points tried at random before the sampler learns from them."""
Evaluate = Callable[[Sequence[Config]], list[Candidate]]


def search(points: Sequence[Config], trials: int, seed: int, evaluate: Evaluate) -> list[Candidate]:
    """Try at most `trials` of `points`, or all if there are fewer. Return the candidates in order.

    Raises `UsageError` if optuna is not installed and would be needed.
    """
    if len(points) <= trials:
        starts = range(0, len(points), BATCH)
        return [each for start in starts for each in evaluate(points[start : start + BATCH])]
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
        firsts: dict[str, int] = {}  # first point of each system: lists begin with the usual settings
        for index, config in enumerate(self._space.points):
            firsts.setdefault(config.system, index)
        for index in firsts.values():
            self._study.enqueue_trial(self._space.parameters(index))
        while len(tried) < trials and self._left:
            count = min(BATCH, trials - len(tried), len(self._left))
            chosen = [self._next() for _ in range(count)]
            candidates = evaluate([self._space.points[index] for index, _ in chosen])
            for (_, trial), candidate in zip(chosen, candidates, strict=True):
                self._study.tell(trial, objectives(candidate))
            tried += candidates
        return tried

    def _next(self) -> tuple[int, Any]:
        """Return a point to try and a trial with exactly the parameters of that point."""
        asked = self._study.ask(self._space.distributions)
        index = self._space.nearest(asked.params, self._left)
        del self._left[index]
        actual = self._space.parameters(index)
        if actual == asked.params:
            return index, asked
        self._study.tell(asked, state=self._failed)
        self._study.enqueue_trial(actual)
        return index, self._study.ask(self._space.distributions)


_LEAST_PAIRS = 3


class RealRuns:
    """Runs points one after the other into `store`, as a sweep does. `total`: maximum number of points for
    `progress`; None if only time limits them."""

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
        """Run the fastest `contenders` `repeat` times each, interleaved, so that a single lucky run does not
        decide between them. Return all `measured` candidates with the new results."""
        fastest = sorted((c for c in measured if c.feasible), key=lambda c: -c.speed)[:contenders]
        again = [candidate.config for candidate in fastest] if repeat > 1 else []
        if again:
            run_sweep(self._store, again, self._inner, jobs=jobs_for(again[0].device), repeat=repeat)
        return [judged(self._store, candidate.config, self._goal) for candidate in measured]


def rank_agreement(pairs: Sequence[tuple[Candidate | None, Candidate]]) -> float | None:
    """Return Spearman's rank correlation of simulated and measured speeds over the points that have both.
    None for fewer than three points, or if all speeds of one side are equal."""
    both = [(known.speed, found.speed) for known, found in pairs if known is not None and found.feasible]
    if len(both) < _LEAST_PAIRS or any(len(set(side)) < 2 for side in zip(*both, strict=True)):
        return None
    from scipy.stats import spearmanr

    return float(spearmanr(*zip(*both, strict=True)).statistic)


class _Continued(Progress):
    """Shows many short sweeps as one. Finished points come first: a resumed search repeats its order."""

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
