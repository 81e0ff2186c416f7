"""The conclusions of a figure, and when a simulated value agrees: one rule, from published values alone.

    RATIO    r, of two published values: the simulated ratio differs from r by at most half of the published
             effect (|ln r| / 2), 2 %, or what reading the two values leaves open: the largest of the three
    LEVEL    a published value: the simulated one differs by at most 5 %, or by what reading leaves open
    RAN_OUT  of the named runs, as many are out of memory
    RETRIES  none, or some, as published: over how many steps they were counted is not

A claim names its places in the figure and nothing else, so no bound can depend on what was simulated.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from fsdpbench.lab.validation.runs.paper import PublishedFigure

Place = int | str
Lookup = Callable[[str, Place], float | None]
"""The value of a series at a place; None: the run was out of memory, or did not finish."""

PART_OF_EFFECT = 0.5
LEAST_RATIO = 0.02
LEAST_LEVEL = 0.05


class Kind(Enum):
    """The kind of a comparison."""

    RATIO = "x"
    LEVEL = "level"
    RAN_OUT = "runs out of memory"
    RETRIES = "retries"


@dataclass(frozen=True)
class Bounds:
    """The values that agree, both ends included."""

    low: float
    high: float

    def hold(self, value: float) -> bool:
        """Whether `value` agrees."""
        return self.low <= value <= self.high


@dataclass(frozen=True)
class Claim:
    """A conclusion from the values at `places`; a ratio is the first over the second.

    `taken`: what of the simulation was set from these same values. Such a claim tests nothing.
    """

    kind: Kind
    words: str
    places: tuple[tuple[str, Place], ...]
    taken: str = ""

    def measure(self, value: Lookup) -> float | None:
        """The compared number; None: it is not known."""
        found = [value(*place) for place in self.places]
        if self.kind is Kind.RAN_OUT:
            return float(sum(each is None for each in found))
        if any(each is None for each in found):
            return None
        known = [each for each in found if each is not None]
        if self.kind is not Kind.RATIO:
            return known[0]
        return known[0] / known[1] if known[0] and known[1] else None

    def bounds(self, figure: PublishedFigure) -> Bounds:
        """Return the simulated numbers that agree with the published ones. Raises `ValueError` for none."""
        published = self.measure(figure.at)
        if published is None:
            raise ValueError(f"figure {figure.name} has no value for the claim '{self.words}'")
        if self.kind is Kind.RAN_OUT:
            return Bounds(published, published)
        if self.kind is Kind.RETRIES:
            return Bounds(1, math.inf) if published else Bounds(0, 0)
        values = (figure.at(*place) for place in self.places)
        read = sum(figure.read_within / value for value in values if value)
        if self.kind is Kind.LEVEL:
            most = max(LEAST_LEVEL, read)
            return Bounds(published * (1 - most), published * (1 + most))
        off = max(PART_OF_EFFECT * abs(math.log(published)), LEAST_RATIO, read)
        return Bounds(published * math.exp(-off), published * math.exp(off))
