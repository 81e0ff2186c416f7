"""Jitter and stragglers: seeded noise on kernels and late ranks in collectives. Off unless asked for.

The simulator takes every kernel for exact and every rank for punctual. Real clusters are neither:

* **kernels**: each kernel and collective takes its time, times a factor around 1 (``kernels`` is its standard
  deviation; the sum of four uniform draws, within 3.5 of them).
* **arrival**: a collective begins when its last rank comes. Each rank is late by a normal draw
  (``arrival_us`` is its standard deviation); the latest of n - 1 others is drawn at once.
* **straggler**: one rank computes slower by this share throughout. Every collective waits for it by that
  share of what this rank has computed since the last one (a slow rank holds up all groups, at once or
  through others).

    rank 0     [== compute ==][AG waits....|== AG ==]
    slowest    [=== compute, later ===]    |

One seed gives one sequence of draws; equal runs are equal to the byte. With it off nothing here is called.
"""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from fsdpbench.numbers import finite_number, whole_number
from fsdpbench.sim.timeline import Contention, Finished, Timeline, Work

_DRAWS = 4
# The sum of n uniform draws has the variance n / 12.
_SCALE = (12 / _DRAWS) ** 0.5
_NORMAL = NormalDist()


class JitterError(ValueError):
    """A text that says no jitter; the message names it and how to write it."""


@dataclass(frozen=True)
class JitterSettings:
    """How much of it. ``kernels`` and ``straggler`` are shares, ``arrival_us`` is in microseconds."""

    seed: int
    kernels: float = 0.02
    arrival_us: float = 20.0
    straggler: float = 0.0

    def __post_init__(self) -> None:
        limits = (("kernels", 0.25), ("arrival_us", 1e6), ("straggler", 10.0))
        for name, most in limits:
            value = getattr(self, name)
            if not 0 <= value <= most:
                raise JitterError(f"jitter: {name}={value} must be from 0 to {most:g}")

    @classmethod
    def parse(cls, text: str) -> JitterSettings:
        """``7``, or ``seed=7,kernels=0.03,arrival_us=50,straggler=0.05``. Raises `JitterError`."""
        fields = {field.name: field for field in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        for part in text.split(","):
            name, equals, value = part.partition("=")
            name, value = (name.strip(), value.strip()) if equals else ("seed", name.strip())
            if name not in fields:
                raise JitterError(f"jitter: unknown {name!r}; known are {', '.join(fields)}")
            try:
                values[name] = whole_number(value, 0) if name == "seed" else finite_number(value)
            except ValueError:
                raise JitterError(
                    f"jitter: {part.strip()!r} is no number; write a seed, or seed=7,kernels=0.03"
                ) from None
        if "seed" not in values:
            raise JitterError(f"jitter: {text!r} has no seed; write seed=7,{text}")
        return cls(**values)

    def to_text(self) -> str:
        """As `parse` reads it."""
        return ",".join(f"{name}={value:g}" for name, value in dataclasses.asdict(self).items())


class Jitter:
    """The draws of one simulation."""

    def __init__(self, settings: JitterSettings) -> None:
        self._settings = settings
        self._draw = random.Random(settings.seed).random
        self._computed_ns = 0
        self._waited_for_ns = 0

    def duration_ns(self, work: Work, duration_ns: int) -> int:
        """A kernel's time with its noise."""
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
        """How long a collective of so many ranks waits for the last of them."""
        if group_size < 2:
            return 0
        computed = self._computed_ns - self._waited_for_ns
        self._waited_for_ns = self._computed_ns
        late = self._settings.straggler * computed
        if self._settings.arrival_us:
            # The greatest of n draws lies below x with the n-th power of one draw's probability.
            latest = self._draw() ** (1 / (group_size - 1))
            own = self._draw()
            sigmas = _NORMAL.inv_cdf(_inside(latest)) - _NORMAL.inv_cdf(_inside(own))
            late += max(sigmas, 0.0) * self._settings.arrival_us * 1000
        return round(late)


def _inside(probability: float) -> float:
    """Away from 0 and 1, where the normal distribution has no quantile."""
    return min(max(probability, 1e-12), 1 - 1e-12)


class JitteredTimeline(Timeline):
    """A timeline whose work takes not quite as long as it should."""

    def __init__(self, contention: Contention, on_finished: Finished, jitter: Jitter) -> None:
        super().__init__(contention, on_finished)
        self._jitter = jitter

    def launch(self, stream: int, work: Work, duration_ns: int, payload: Any = None) -> None:
        """Queue work, its duration drawn."""
        super().launch(stream, work, self._jitter.duration_ns(work, duration_ns), payload)
