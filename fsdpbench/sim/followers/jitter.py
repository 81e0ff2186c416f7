"""Jitter and stragglers: seeded noise on kernels and late ranks in collectives. Off by default.

By default every kernel is exact and every rank punctual. Real clusters are neither:

- **kernels**: each kernel's and collective's time is multiplied by a factor around 1 (`kernels` is its
standard deviation; the sum of four uniform draws, within 3.5 of them).
- **arrival**: a collective begins when its last rank arrives. Each rank is late by a normal draw
(`arrival_us` is its standard deviation); the latest of n - 1 others is drawn directly.
- **straggler**: one rank computes slower by this share throughout. Every collective waits for it by that
share of this rank's computation since the last one (a slow rank delays all groups, if through others).

    rank 0     [== compute ==][AG waits....|== AG ==]
    slowest    [=== compute, later ===]    |

One seed gives one sequence of draws; equal runs are equal to the byte. With it off nothing here is called.
"""

import random
from statistics import NormalDist

from fsdpbench.base.configuration.config import JitterSettings
from fsdpbench.sim.model.observed import Observer
from fsdpbench.sim.model.timeline import Work

_DRAWS = 4
# The sum of n uniform draws has the variance n / 12.
_SCALE = (12 / _DRAWS) ** 0.5
_NORMAL = NormalDist()


class Jitter(Observer):
    """Random draws of one simulation."""

    def __init__(self, settings: JitterSettings) -> None:
        self._settings = settings
        self._draw = random.Random(settings.seed).random
        self._computed_ns = 0
        self._waited_for_ns = 0

    def drawn_ns(self, work: Work, duration_ns: int) -> int:
        """Return a kernel's time with its noise, in nanoseconds."""
        spread = self._settings.kernels
        if spread:
            draw = self._draw
            duration_ns = round(
                duration_ns * (1 + spread * _SCALE * (draw() + draw() + draw() + draw() - _DRAWS / 2))
            )
        if work is Work.COMPUTE:
            self._computed_ns += duration_ns
        return duration_ns

    def lateness_ns(self, group_size: int) -> int:
        """Return how long a collective of so many ranks waits for the last of them, in ns."""
        if group_size < 2:
            return 0
        computed = self._computed_ns - self._waited_for_ns
        self._waited_for_ns = self._computed_ns
        late = self._settings.straggler * computed
        if self._settings.arrival_us:
            # P(the greatest of n draws < x) is the n-th power of one draw's probability.
            latest = self._draw() ** (1 / (group_size - 1))
            own = self._draw()
            sigmas = _NORMAL.inv_cdf(_inside(latest)) - _NORMAL.inv_cdf(_inside(own))
            late += max(sigmas, 0.0) * self._settings.arrival_us * 1000
        return round(late)


def _inside(probability: float) -> float:
    """Clamp away from 0 and 1, where the normal distribution has no quantile."""
    return min(max(probability, 1e-12), 1 - 1e-12)
