"""The figures that the gate compares, and which way each of them gets worse.

On `sim` every one of them is exact. On real devices counts still are, as a rule, and the rest has a
distribution over runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fsdpbench.reports.figures import FIGURES, LARGEST, Judged
from fsdpbench.reports.figures import Figure as Row
from fsdpbench.reports.reading import one_line

# One figure as it was read: a number that can be true, `None` where it is unknown, or what is there
# instead and why it cannot be one.

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


METRICS = {row.name: row for row in FIGURES if row.judged in (Judged.YES, Judged.MEASURED)}

WITNESSES = {row.name: row for row in FIGURES if row.judged is Judged.WITNESS}
"""Not judged, but kept in a baseline: they bind the figures that are (`reports.consistency`)."""

ALL = {**METRICS, **WITNESSES}

ALWAYS_KNOWN = "step_time_s"
"""Of every configuration that ended well, on every device."""


def figures_of(values: Mapping[str, Any]) -> dict[str, Figure]:
    """Return every metric and witness by name, of `values` by name in `reports.consistency`: None where it
    is not known, `Unusable` where it cannot be one."""
    unknown = [Judged.MEASURED] if values.get("device") == "sim" else []
    return {
        name: None if row.judged in unknown else checked(row, values.get(row.path))
        for name, row in ALL.items()
    }


def checked(row: Row, value: object) -> Figure:
    """Return `value` as the figure of `row`."""
    return figure_from(value, row.least_judged, min(row.most, LARGEST))
