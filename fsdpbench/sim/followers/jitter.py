"""Jitter and stragglers: seeded noise on kernels and late ranks in collectives. Off by default.

By default kernel times have no noise and no rank is late. Real clusters differ in three ways:

- **kernels**: the time of each kernel and collective is multiplied by a random factor around 1, the sum of
four uniform draws (`kernels`: its standard deviation; at most 3.5 of them from 1).
- **arrival**: a collective begins when its last rank arrives. Each rank's delay is a normal draw
(`arrival_us`: its standard deviation); the latest of the other n - 1 ranks is drawn directly.
- **straggler**: one rank computes slower by this share. Every collective waits for that share of the time
that this rank computed since the last collective (a slow rank delays all groups, directly or through others).

    rank 0     [== compute ==][AG waits....|== AG ==]
    slowest    [=== compute, later ===]    |

The draws follow from the seed, so equal runs are equal to the byte. If it is off, nothing here is called.
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
    """Random delays of one simulation."""

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
        """Return how long a collective of `group_size` ranks waits for the last rank, in ns."""
        if group_size < 2:
            return 0
        computed = self._computed_ns - self._waited_for_ns
        self._waited_for_ns = self._computed_ns
        late = self._settings.straggler * computed
        if self._settings.arrival_us:
            # P(the largest of n draws < x) is the n-th power of the probability for one draw.
            latest = self._draw() ** (1 / (group_size - 1))
            own = self._draw()
            sigmas = _NORMAL.inv_cdf(_inside(latest)) - _NORMAL.inv_cdf(_inside(own))
            late += max(sigmas, 0.0) * self._settings.arrival_us * 1000
        return round(late)


def _inside(probability: float) -> float:
    """Clamp a probability away from 0 and 1, where the normal distribution has no quantile."""
    return min(max(probability, 1e-12), 1 - 1e-12)
