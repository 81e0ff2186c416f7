"""A against A: how far two sets of runs of the same code differ on this machine.

Runs of a configuration are split by chance, many times; 99 % of the splits stay below the minimum effect.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from scipy.stats import mannwhitneyu

from fsdpbench.answers.check.metrics import METRICS
from fsdpbench.answers.check.records.entries import Entry
from fsdpbench.answers.check.thresholds import MOST_ALLOWED, USUAL_MINIMUM_EFFECT
from fsdpbench.base.errors import CannotJudgeError
from fsdpbench.engine.results.records import Status
from fsdpbench.reports.figures import Worse

_SPLITS = 500
_QUANTILE = 0.99
_FEWEST_RUNS = 6
_GRAIN = 0.001


@dataclass(frozen=True)
class Noise:
    """`effects`: the relative change that 99 % of A/A comparisons stay below, by metric; `runs` of each."""

    effects: Mapping[str, float]
    runs: int

    def minimum_effects(self) -> dict[str, float]:
        """Return thresholds: the effects rounded up to 0.1 %, within what thresholds may be."""
        return {
            name: round(min(MOST_ALLOWED, max(USUAL_MINIMUM_EFFECT, math.ceil(value / _GRAIN) * _GRAIN)), 4)
            for name, value in self.effects.items()
        }


def measure_noise(entries: Mapping[str, Entry]) -> Noise:
    """Return the noise of repeated runs. Metrics that were equal in all runs have none.

    Raises `CannotJudgeError` for simulated entries, for what failed or has impossible figures, and where
    there are too few runs to split.
    """
    if any(entry.is_exact for entry in entries.values()):
        raise CannotJudgeError("simulated figures are exact: there is no noise to measure")
    for name, entry in entries.items():
        if entry.status is not Status.OK:
            raise CannotJudgeError(f"{name}: ended with {entry.status.value}: there is no noise to measure")
        for figure, why in entry.flaws().items():
            raise CannotJudgeError(f"{name}: {figure} {why}")
    runs = min((len(entry.runs) for entry in entries.values()), default=0)
    if runs < _FEWEST_RUNS:
        raise CannotJudgeError(
            f"{runs} runs a configuration are too few to split in two: at least {_FEWEST_RUNS} are needed "
            f"(--repeat {_FEWEST_RUNS})"
        )
    generator = np.random.default_rng(0)
    effects: dict[str, float] = {}
    judged = [metric.name for metric in METRICS.values() if metric.worse is not Worse.NEITHER]
    for entry in entries.values():
        for metric in judged:
            values = entry.values(metric)
            if len(set(values)) > 1:
                effects[metric] = max(effects.get(metric, 0.0), _of_splits(values, generator))
    return Noise({name: value for name, value in effects.items() if math.isfinite(value)}, runs)


def _of_splits(values: Sequence[float], generator: np.random.Generator) -> float:
    half = len(values) // 2
    drawn = (generator.permutation(values).tolist() for _ in range(_SPLITS))
    found = [abs(effect(each[:half], each[half:])) for each in drawn]
    return float(np.quantile(found, _QUANTILE))


# Whether two samples of runs differ: a rank test, how large the difference is, and many tests at the same
# time.
# Ranks, because run times have long tails and no normal distribution; an effect, because with enough runs any
# difference is certain; Holm's correction, because ten metrics at level 0.01 raise one false alarm in ten.


def p_value(before: Sequence[float], after: Sequence[float]) -> float:
    """Two-sided, of Mann and Whitney's rank test (1947): the chance of ranks as uneven as these, or more so,
    if both samples come from one distribution. Exact for small samples without ties."""
    if len(set(before) | set(after)) == 1:
        return 1.0
    return float(mannwhitneyu(before, after, alternative="two-sided").pvalue)


def least_p_value(before: int, after: int) -> float:
    """Return the least p-value of so many runs on each side: all of one below all of the other."""
    return 2 / math.comb(before + after, before)


def runs_needed(level: float) -> int:
    """Runs a side with which the test can reach `level` at all."""
    runs = 2
    while least_p_value(runs, runs) > level:
        runs += 1
    return runs


def effect(before: Sequence[float], after: Sequence[float]) -> float:
    """Return the relative change (0.1: a tenth more): the median of all differences between a run after and
    one before (Hodges and Lehmann's estimate, 1963) over the median before. Infinite if that is 0."""
    shift = float(np.median(np.subtract.outer(np.asarray(after), np.asarray(before))))
    if shift == 0.0:
        return 0.0
    base = abs(median(before))
    return shift / base if base else math.copysign(math.inf, shift)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values adjusted for their number (Holm, 1979), in the same order: comparing each with a
    level keeps the chance of any false alarm among them below it."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted = [0.0] * len(p_values)
    greatest = 0.0
    for rank, i in enumerate(order):
        greatest = max(greatest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = greatest
    return adjusted
