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
class Column:
    """A header; `numeric` columns are aligned right and sorted as numbers."""

    name: str
    numeric: bool


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell: its text, the number it sorts by, and how it looks."""

    text: str
    classes: str = "value"
    sort: float | None = None
    share: float | None = None
    hint: str = ""
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Filter:
    """A drop-down over the values of one column."""

    name: str
    column: int
    choices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """A configuration with its cells. `chosen`: its step can be shown; `links`: to its files."""

    of: Configuration
    place: int | None
    label: str
    chosen: bool
    cells: tuple[Cell, ...]
    links: tuple[dict[str, str], ...]


@dataclass(frozen=True, slots=True)
class RankingTable:
    """Columns (the first is the place), rows best first, filters."""

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    filters: tuple[Filter, ...]


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


def ranking_table(
    ranked: Sequence[Ranked],
    varying: Sequence[str],
    metric: Metric,
    with_detail: frozenset[str],
    links: Links,
) -> RankingTable:
    """Return the table of all configurations; `with_detail` names the folders whose step can be shown."""
    shown = known_figures(ranked, metric)
    shown[1:1] = _shared_ranks(ranked)
    columns = [Column("#", True), *(Column(name, False) for name in varying)]
    columns += [*(Column(figure.name, True) for figure in shown), Column("status", False)]
    all_rows = [entry.row for entry in ranked]
    filters = [
        Filter(name, place, tuple(values_of(all_rows, name))) for place, name in enumerate(varying, start=1)
    ]
    statuses = tuple(status.words for status in Status if any(row.status is status for row in all_rows))
    filters.append(Filter("status", len(columns) - 1, statuses))
    filters = [
        Filter(f.name, f.column, tuple(c[:80] for c in f.choices)) for f in filters if len(f.choices) > 1
    ]
    return RankingTable(
        columns=tuple(columns),
        rows=tuple(_row(entry, varying, shown, with_detail, links) for entry in ranked),
        filters=tuple(filters),
    )


def _row(
    entry: Ranked, varying: Sequence[str], shown: Sequence[Shown], with_detail: frozenset[str], links: Links
) -> Row:
    row = entry.row
    cells = [_setting_cell(row, name) for name in varying]
    cells += [_figure_cell(entry, figure, share=place == 0) for place, figure in enumerate(shown)]
    cells.append(_status_cell(row))
    chosen = row.folder.name in with_detail
    return Row(row, entry.place, label(row, varying), chosen, tuple(cells), tuple(links(row)))


def _setting_cell(row: Configuration, name: str) -> Cell:
    value = display.setting(row.settings[name]) if name in row.settings else NOTHING
    return Cell(value, hint=value[:600] if len(value) > 40 else "")


def _status_cell(row: Configuration) -> Cell:
    if row.status is Status.OK:
        return Cell("ok", "status good")
    kind = "skipped" if row.status is Status.NOT_APPLICABLE else "bad"
    return Cell(row.status.words, f"status {kind}", cause=row.problem or "")


_WITH_FIGURES = (Status.OK, Status.OOM, Status.RACE, Status.RANK_MISMATCH)


def _figure_cell(entry: Ranked, figure: Shown, *, share: bool) -> Cell:
    value = figure.value(entry.row) if entry.row.status in _WITH_FIGURES else None
    classes = "number share" if share else "number"
    if figure.warned and value:
        classes += " warned"
    return Cell(
        figure.text(value), classes, value, round(entry.of_best, 4) if share and entry.of_best else None
    )
