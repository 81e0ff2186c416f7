"""The ranked table: a column for each varying setting and known figure, a row a configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fsdpbench.reports.figures import FIGURES, Figure
from fsdpbench.reports.pages import display
from fsdpbench.reports.pages.display import NOTHING
from fsdpbench.reports.pages.ranking import Metric, Ranked, label, values_of
from fsdpbench.reports.pages.view import Configuration, Status

Links = Callable[[Configuration], list[dict[str, str]]]


@dataclass(frozen=True, slots=True)
class Shown:
    """A column of figures: its header, the value to sort by, the text to show, whether values are marked, and
    its weight on a terminal."""

    name: str
    value: Callable[[Configuration], float | None]
    text: Callable[[float | None], str]
    warned: bool = False
    weight: int = 0


def column_of(figure: Figure, each: str) -> Shown:
    """Return the column of a row of the table of figures; `each`: `GPU` or `rank`."""
    header = (figure.column or figure.detail).format(each=each)
    text, warned = getattr(display, figure.form), "warned" in figure.marks
    return Shown(header, lambda row: figure.of(row.result), text, warned, figure.weight)


def figures(metric: Metric) -> list[Shown]:
    """Return every figure that a result can hold, in the order of the table's columns."""

    def half_width(row: Configuration) -> float | None:
        return None if row.result.interval is None else row.result.interval.half_width

    return [
        Shown(metric.words, metric.of, lambda value: display.number(value, 4)),
        Shown("90 % ±", half_width, display.percent, weight=8),
        *(column_of(figure, metric.each) for figure in FIGURES if figure.column),
    ]


def known_figures(ranked: Sequence[Ranked], metric: Metric) -> list[Shown]:
    """Return the figures that at least one row knows; HFU only where it differs from MFU."""
    rows = [entry.row for entry in ranked]
    known = [figure for figure in figures(metric) if any(figure.value(row) is not None for row in rows)]
    if all(row.result.hfu == row.result.mfu for row in rows):
        known = [figure for figure in known if figure.name != "HFU"]
    if not any(row.result.ooms for row in rows):
        known = [figure for figure in known if figure.name != "out of memory"]
    return known


def _shared_ranks(ranked: Sequence[Ranked]) -> list[Shown]:
    """Return the column of ranks, where rows share one because they cannot be distinguished."""
    ranks = {id(entry.row): entry.rank for entry in ranked}
    given = [rank for rank in ranks.values() if rank is not None]
    if len(set(given)) == len(given):
        return []
    return [Shown("rank", lambda row: ranks[id(row)], display.count)]


_WITH_FIGURES = (Status.OK, Status.OOM, Status.RACE, Status.RANK_MISMATCH)


@dataclass(frozen=True, slots=True)
class RankingTable:
    """All configurations, best first; columns are the place, settings that vary, figures, and the status.

    filters: name, number of the column and choices of a drop-down over its values.
    with_detail: names of the folders whose step can be shown.
    """

    ranked: Sequence[Ranked]
    varying: Sequence[str]
    figures: Sequence[Shown]
    filters: Sequence[tuple[str, int, list[str]]]
    with_detail: frozenset[str]
    links: Links

    @classmethod
    def of(
        cls,
        ranked: Sequence[Ranked],
        varying: Sequence[str],
        metric: Metric,
        with_detail: frozenset[str],
        links: Links,
    ) -> RankingTable:
        """Return the table with figures of `metric`, and filters where there is a choice."""
        shown = known_figures(ranked, metric)
        shown[1:1] = _shared_ranks(ranked)
        rows = [entry.row for entry in ranked]
        statuses = [status.words for status in Status if any(row.status is status for row in rows)]
        choices = [
            *((name, place, values_of(rows, name)) for place, name in enumerate(varying, start=1)),
            ("status", 1 + len(varying) + len(shown), statuses),
        ]
        filters = [(name, place, values) for name, place, values in choices if len(values) > 1]
        return cls(ranked, varying, shown, filters, with_detail, links)

    def label(self, row: Configuration) -> str:
        """Return the row's varying settings."""
        return label(row, self.varying)

    def setting(self, row: Configuration, name: str) -> str:
        """Return a setting of the row as it is shown."""
        return display.setting(row.settings[name]) if name in row.settings else NOTHING

    def value(self, row: Configuration, figure: Shown) -> float | None:
        """Return a figure of the row; None where the row's figures are not to be shown."""
        return figure.value(row) if row.status in _WITH_FIGURES else None
