"""Compares two sides, configuration by configuration and figure by figure.

    exact (simulated, or equal in all runs of a side)    any difference counts, thresholds by metric
    else                                                 rank test and minimum effect, over runs

All tests of a comparison are corrected together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import median

from fsdpbench.check.entries import Entry
from fsdpbench.check.metrics import METRICS, Worse
from fsdpbench.check.statistics import effect, holm, least_p_value, p_value, runs_needed
from fsdpbench.check.thresholds import Thresholds
from fsdpbench.errors import CannotJudgeError
from fsdpbench.records import Status

Entries = Mapping[str, Entry]


class Verdict(StrEnum):
    """What one figure's change means, the most pressing first. NOISE: no change that the runs can show."""

    WORSE = "worse"
    BETTER = "better"
    CHANGED = "changed"
    ALLOWED = "allowed"
    NOISE = "noise"


@dataclass(frozen=True)
class Change:
    """One figure that differs. `before` and `after`: medians over runs, None where it was not known.

    chance: p-value of the rank test, adjusted for the number of tests; None for exact figures.
    runs: on each side.
    """

    configuration: str
    metric: str
    before: float | str | None
    after: float | str | None
    verdict: Verdict
    relative: float | None = None
    chance: float | None = None
    runs: tuple[int, int] = (1, 1)


@dataclass(frozen=True)
class Comparison:
    """All changes, and configurations that only one side has."""

    changes: tuple[Change, ...]
    missing: tuple[str, ...]
    added: tuple[str, ...]
    compared: int

    @property
    def regressions(self) -> tuple[Change, ...]:
        return self.of(Verdict.WORSE)

    def of(self, verdict: Verdict) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if change.verdict is verdict)


def compare(before: Entries, after: Entries, thresholds: Thresholds) -> Comparison:
    """Both map configuration names to entries.

    Raises `CannotJudgeError` where there are too few runs for the rank test to tell anything at this level.
    """
    both = [name for name in before if name in after]
    found: list[Change] = []
    for name in both:
        found += _changes(name, before[name], after[name], thresholds)
    return Comparison(
        changes=tuple(_corrected(found, thresholds)),
        missing=tuple(name for name in before if name not in after),
        added=tuple(name for name in after if name not in before),
        compared=len(both),
    )


def _changes(name: str, before: Entry, after: Entry, thresholds: Thresholds) -> Iterator[Change]:
    if before.status is not after.status:
        verdict = Verdict.WORSE if before.status is Status.OK else Verdict.BETTER
        if Status.OK not in (before.status, after.status):
            verdict = Verdict.CHANGED
        yield Change(name, "status", before.status.value, after.status.value, verdict)
        return
    for metric in METRICS:
        old, new = before.values(metric), after.values(metric)
        if not old and not new:
            continue
        constant = len(set(old)) == len(set(new)) == 1 and len(old) + len(new) > 2
        if before.is_exact or constant or not old or not new:
            change = _exact(name, metric, old, new, thresholds)
        else:
            change = _tested(name, metric, old, new)
        if change is not None:
            yield change


def _exact(
    name: str, metric: str, before: list[float], after: list[float], thresholds: Thresholds
) -> Change | None:
    old = before[0] if before else None
    new = after[0] if after else None
    if old == new:
        return None
    runs = (len(before), len(after))
    if old is None or new is None:
        # A kind of collective that was not there before costs something; one that is gone costs nothing.
        verdict = Verdict.WORSE if old is None else Verdict.BETTER
        if METRICS[metric].worse is Worse.NEITHER:
            verdict = Verdict.CHANGED
        return Change(name, metric, old, new, verdict, runs=runs)
    relative = (new - old) / abs(old) if old else None
    verdict = _direction(metric, new - old)
    if abs(new - old) <= thresholds.allowed(metric) * abs(old):
        verdict = Verdict.ALLOWED
    return Change(name, metric, old, new, verdict, relative, runs=runs)


def _tested(name: str, metric: str, before: list[float], after: list[float]) -> Change:
    """Its `chance` is not adjusted yet, nor its verdict final."""
    change = effect(before, after)
    runs = (len(before), len(after))
    verdict = _direction(metric, change)
    chance = p_value(before, after)
    return Change(name, metric, median(before), median(after), verdict, change, chance, runs)


def _corrected(changes: list[Change], thresholds: Thresholds) -> Iterator[Change]:
    """The changes with all rank tests corrected for their number."""
    tested = [change for change in changes if change.chance is not None]
    _refuse_too_few(tested, thresholds.level)
    chances = iter(holm([change.chance or 0.0 for change in tested]))
    for change in changes:
        if change.chance is None:
            yield change
            continue
        chance = next(chances)
        shown = chance < thresholds.level and abs(change.relative or 0.0) >= thresholds.least_effect(
            change.metric
        )
        yield replace(change, chance=chance, verdict=change.verdict if shown else Verdict.NOISE)


def _refuse_too_few(tested: list[Change], level: float) -> None:
    if not tested:
        return
    fewest = min(tested, key=lambda change: min(change.runs))
    if least_p_value(*fewest.runs) * len(tested) > level:
        needed = runs_needed(level / len(tested))
        raise CannotJudgeError(
            f"{fewest.configuration}: {fewest.runs[0]} and {fewest.runs[1]} measured runs cannot show a "
            f"change at level {level:g} over {len(tested)} figures: at least {needed} a side are needed "
            f"(`fsdpbench sweep --repeat {needed}`)"
        )


def _direction(metric: str, change: float) -> Verdict:
    worse = METRICS[metric].worse
    if worse is Worse.NEITHER:
        return Verdict.CHANGED
    return Verdict.WORSE if (change > 0) == (worse is Worse.HIGHER) else Verdict.BETTER
