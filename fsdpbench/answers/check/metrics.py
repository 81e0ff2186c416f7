"""The figures that the gate compares, and the direction in which each gets worse.

On `sim` all figures are exact. On real devices counts usually are too; other figures have a distribution
over runs.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdpbench.base.reading import one_line
from fsdpbench.reports.analysis.model import Analysis
from fsdpbench.reports.consistency import Contradiction, broken_rules, with_sums
from fsdpbench.reports.figures import FIGURES, LARGEST, Judged, computed
from fsdpbench.reports.figures import Figure as Row
from fsdpbench.reports.rank_record import RankRecord

# One figure as read: a plausible number, `None` if it is unknown, or an `Unusable` value with the reason.

_LONGEST_VALUE = 60


@dataclass(frozen=True)
class Unusable:
    """A value that cannot be used as a figure: its text, and `why`."""

    shown: str
    why: str

    @classmethod
    def of(cls, value: object, why: str) -> "Unusable":
        """Return an `Unusable` for a value of any type and length."""
        huge = isinstance(value, int) and abs(value) > LARGEST
        return cls("an integer beyond 2^63" if huge else one_line(repr(value), _LONGEST_VALUE), why)

    def __str__(self) -> str:
        return f"{self.shown} ({self.why})"


Figure = float | None | Unusable


def figure_from(value: object, least: float = 0.0, most: float = LARGEST) -> Figure:
    """Return `value` if it is a valid figure between `least` and `most`, else `Unusable`."""
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
"""Figures that are not judged but stored in a baseline, to check the judged ones (`reports.consistency`)."""

ALL = {**METRICS, **WITNESSES}

ALWAYS_KNOWN = "step_time_s"
"""The figure that every successful configuration has, on every device."""


def figures_of(values: Mapping[str, Any]) -> dict[str, Figure]:
    """Return every metric and witness by name, from `values` with the names of `reports.consistency`: None if
    it is not known, `Unusable` if it is invalid."""
    unknown = [Judged.MEASURED] if values.get("device") == "sim" else []
    return {
        name: None if row.judged in unknown else checked(row, values.get(row.path))
        for name, row in ALL.items()
    }


def checked(row: Row, value: object) -> Figure:
    """Return `value` as the figure of `row`, checked."""
    return figure_from(value, row.least_judged, min(row.most, LARGEST))


# Checks of the figures of one run: each alone, against each other, and against the rank records.
# A baseline has fewer figures than a result. A relation is skipped unless all of its figures are known.

_KINDS = ("all_gather", "reduce_scatter", "all_reduce")
_METRIC_OF = {row.path: name for name, row in ALL.items()} | {
    "time_s.compute_only": "compute_s",
    "measured.step_times_s": "fastest_step_s",
    "late_all_gathers.late": "late_all_gathers",
    "late_all_gathers.prefetched": "prefetched_all_gathers",
}


def checked_run(run: Mapping[str, object]) -> dict[str, Figure]:
    """Return the figures of a run by metric, each checked alone. If there is no collective of a kind, its
    bytes are 0."""
    figures = {name: checked(row, run.get(name)) for name, row in ALL.items()}
    for kind in _KINDS:
        if figures[f"{kind}_count"] == 0 and figures[f"{kind}_bytes"] is None:
            figures[f"{kind}_bytes"] = 0
    return figures


def contradictions(device: str, figures: Mapping[str, Figure]) -> dict[str, str]:
    """Return the contradictions between the figures of a run, by metric."""
    known = {name: value for name, value in figures.items() if isinstance(value, int | float)}
    values: dict[str, object] = {ALL[name].path: value for name, value in known.items()}
    values |= {"device": device, "has_retries": known.get("alloc_retries_per_step")}
    return by_metric(broken_rules(with_sums(values)))


def by_metric(found: Iterable[Contradiction]) -> dict[str, str]:
    """Return the first contradiction of each figure, by metric, or by its own name if it is not a metric."""
    sentences: dict[str, str] = {}
    for each in found:
        named = [_METRIC_OF[name] for name in each.figures if name in _METRIC_OF]
        for name in named or each.figures[:1]:
            sentences.setdefault(name, each.sentence)
    return sentences


def with_records(result: Mapping[str, Any], records: Sequence[RankRecord]) -> Mapping[str, Any]:
    """Return `result` with the figures computed from its ranks' records in `records`, if none is missing."""
    try:
        if len(records) >= (result["device"] == "sim" or records[0].world_size):
            return {**result, "records": computed(records, Analysis(ranks=(), configurations={}))}
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        pass  # ignore broken records
    return result


def communicates(figures: Mapping[str, Figure]) -> bool:
    """Return whether the run had communication that could overlap; True if that is not known."""
    known = (*(f"{kind}_count" for kind in _KINDS), "exposed_communication_s")
    return any(figures[name] != 0 for name in known)
