"""Whether two samples of runs differ: a rank test, how large the difference is, and many tests at the same
time.

Ranks, because run times have long tails and no normal distribution; an effect, because with enough runs any
difference is certain; Holm's correction, because ten metrics at level 0.01 raise one false alarm in ten
comparisons.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

import numpy as np
from scipy.stats import mannwhitneyu


def p_value(before: Sequence[float], after: Sequence[float]) -> float:
    """Two-sided, of Mann and Whitney's rank test (1947): the chance of ranks as uneven as these, or more so,
    if both samples come from one distribution. Exact for small samples without ties."""
    if len(set(before) | set(after)) == 1:
        return 1.0
    return float(mannwhitneyu(before, after, alternative="two-sided").pvalue)


def least_p_value(before: int, after: int) -> float:
    """What the test can give at best with so many runs on each side: all of one below all of the other."""
    return 2 / math.comb(before + after, before)


def runs_needed(level: float) -> int:
    """Runs a side with which the test can reach `level` at all."""
    runs = 2
    while least_p_value(runs, runs) > level:
        runs += 1
    return runs


def effect(before: Sequence[float], after: Sequence[float]) -> float:
    """The relative change (0.1: a tenth more): the median of all differences between a run after and one
    before (Hodges and Lehmann's estimate, 1963) over the median before. Infinite if that is 0."""
    shift = float(np.median(np.subtract.outer(np.asarray(after), np.asarray(before))))
    if shift == 0.0:
        return 0.0
    base = abs(median(before))
    return shift / base if base else math.copysign(math.inf, shift)


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values adjusted for their number (Holm, 1979), in the same order: comparing each with a level
    keeps the chance of any false alarm among them below it."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted = [0.0] * len(p_values)
    greatest = 0.0
    for rank, i in enumerate(order):
        greatest = max(greatest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = greatest
    return adjusted
