"""Where a series of figures over commits changes level.

Exact figures (simulated ones) change where they differ. Of measured ones the steps are found by E-divisive
means (Matteson and James, "A nonparametric approach for multiple change point analysis of multivariate
data", JASA 2014): the split whose two sides are farthest apart in energy distance, believed if few
permutations of the series split as well, and then each side again. It asks nothing of the noise's shape and
is what performance tests of databases are watched by (Daly et al., "The use of change point detection to
identify software performance regressions in a continuous integration system", ICPE 2020).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

EXACT = 1e-12
"""Relative differences up to this are the rounding of a sum."""
LEVEL = 0.05
PERMUTATIONS = 199
LEAST_SEGMENT = 3
"""Commits on either side of a step of measured figures: fewer look like noise at this level."""

Floats = npt.NDArray[np.float64]


def exact_steps(values: Sequence[float]) -> list[int]:
    """Each place whose value differs from the one before it."""
    return [
        place
        for place in range(1, len(values))
        if abs(values[place] - values[place - 1]) > EXACT * max(abs(values[place]), abs(values[place - 1]))
    ]


def measured_steps(values: Sequence[float], *, level: float = LEVEL, seed: int = 0) -> list[int]:
    """Places where a new level begins, in order. The same for the same values: permutations have a seed."""
    series = np.asarray(values, np.float64)
    found: list[int] = []
    random = np.random.default_rng(seed)
    parts = [(0, len(series))]
    while parts:
        low, high = parts.pop()
        split = _split(series[low:high], level, random)
        if split is not None:
            found.append(low + split)
            parts += [(low, low + split), (low + split, high)]
    return sorted(found)


def _split(series: Floats, level: float, random: np.random.Generator) -> int | None:
    """The most likely place, if it is one."""
    if len(series) < 2 * LEAST_SEGMENT or not np.ptp(series):
        return None
    apart = np.abs(series[:, None] - series[None, :])
    best, place = _farthest(apart)
    as_good = 0
    for _ in range(PERMUTATIONS):
        order = random.permutation(len(series))
        as_good += _farthest(apart[np.ix_(order, order)])[0] >= best
    return place if (as_good + 1) / (PERMUTATIONS + 1) <= level else None


def _farthest(apart: Floats) -> tuple[float, int]:
    """The largest scaled energy distance of two sides, and where the second one begins.

    For sides of n and m values: mn/(m+n) (2 mean|x-y| - mean|x-x'| - mean|y-y'|).
    """
    count = len(apart)
    # Sums of the distances inside the first k, inside the rest, and between both, for every k at once.
    upper = np.triu(apart, 1)
    first = np.cumsum(upper.sum(axis=0))
    rest = np.cumsum(upper.sum(axis=1)[::-1])[::-1]
    best, place = -1.0, LEAST_SEGMENT
    total = upper.sum()
    for k in range(LEAST_SEGMENT, count - LEAST_SEGMENT + 1):
        n, m = k, count - k
        inside, beyond = first[k - 1], rest[k]
        between = total - inside - beyond
        energy = 2 * between / (n * m) - 2 * inside / (n * (n - 1)) - 2 * beyond / (m * (m - 1))
        scaled = n * m / (n + m) * energy
        if scaled > best:
            best, place = float(scaled), k
    return best, place
