"""One figure as it was read: a number that can be true, `None` where it is unknown, or what is there
instead and why it cannot be one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fsdpbench.reports.outside_text import one_line

LARGEST = 2.0**63
"""No time, size or count of a step is beyond it, and sums and differences below it stay finite."""

_LONGEST_VALUE = 60


@dataclass(frozen=True)
class Unusable:
    """`shown`: what was read.  why: it is not a figure."""

    shown: str
    why: str

    @classmethod
    def of(cls, value: object, why: str) -> Unusable:
        """For what was read, of any type and length."""
        huge = isinstance(value, int) and abs(value) > LARGEST
        return cls("an integer beyond 2^63" if huge else one_line(repr(value), _LONGEST_VALUE), why)

    def __str__(self) -> str:
        return f"{self.shown} ({self.why})"


Figure = float | None | Unusable


def figure_from(value: object, least: float = 0.0, most: float = LARGEST) -> Figure:
    """`value` as a figure between `least` and `most`."""
    if value is None or isinstance(value, Unusable):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        return Unusable.of(value, "no number")
    if isinstance(value, float) and not math.isfinite(value):
        return Unusable.of(value, "not finite")
    if value < least:
        return Unusable.of(value, "negative" if value < 0 else "impossibly small")
    if value > most:
        return Unusable.of(value, f"above {most:g}, which cannot be")
    return value
