"""Tables of configurations that fit a terminal: a column for each setting that differs, then figures.

If there is no room, the least important figures are dropped first. Then the settings that differ least are
combined in one column, `changed`, which shows how a row differs from most others. No figure is truncated.
"""

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

GAP = 2
ESSENTIAL = 7  # figures of this weight or more are dropped only after all settings share one column


@dataclass(frozen=True)
class Column:
    """A column. weight: figures with the lowest are dropped first; 0: never. phrases: a setting in words."""

    title: str
    cells: Sequence[str]
    right: bool = True
    weight: int = 0
    phrases: Sequence[str] = ()

    @cached_property
    def width(self) -> int:
        """Return the width in characters; the title's words may be on separate lines."""
        lines = [*self.title.split(), *(line for cell in self.cells for line in cell.splitlines())]
        return max(map(len, lines), default=1)

    @property
    def usual(self) -> tuple[str, int]:
        """Return the most frequent phrase, and the number of rows that have it or lack the setting."""
        known = [each for each in self.phrases if each]
        phrase, count = Counter(known).most_common(1)[0] if known else ("", 0)
        return phrase, count + len(self.phrases) - len(known)


def setting_columns(rows: Sequence[Mapping[str, Any]], shown: Sequence[Mapping[str, Any]]) -> list[Column]:
    """Return a column for each setting that differs among `rows`, with the cells of the rows in `shown`."""
    from fsdpbench.reports.pages.display import header, in_table, phrase, varying  # imports numpy

    return [
        Column(
            header(name),
            [in_table(name, row.get(name)) for row in shown],
            right=False,
            phrases=["" if row.get(name) is None else phrase(name, row[name]) for row in shown],
        )
        for name in varying(rows)
        if name != "model" and shown
    ]


def fitting(
    place: Column, settings: Sequence[Column], figures: Sequence[Column], width: int
) -> tuple[list[Column], str]:
    """Return the columns that fit into `width` characters, and the common values of the settings in the
    column `changed` (empty without that column)."""
    alike = sorted(settings, key=lambda column: (column.title == "system", -column.usual[1]))
    weights = sorted({column.weight for column in figures} - {0})
    minor = sum(weight < ESSENTIAL for weight in weights)
    steps = [(left_out, 0) for left_out in range(minor + 1)]
    for left_out in range(minor, len(weights) + 1):
        steps += [(left_out, folded) for folded in range(2, len(settings) + 1)]
    for left_out, folded in steps:
        kept = [column for column in figures if column.weight not in weights[:left_out]]
        named = [column for column in settings if column not in alike[:folded]]
        changed = _changed(alike[:folded])
        laid = [place, *named, *changed, *kept]
        if total(laid) <= width:
            break
    else:
        laid = [place, *_changed(settings, width - total([place, *kept]) - GAP), *kept]
    return laid, ", ".join(column.usual[0] for column in alike[:folded] if column.usual[0])


def _changed(columns: Sequence[Column], room: int = 1000) -> list[Column]:
    """Return a column of the phrases that differ from the most frequent ones, wrapped to `room`."""
    if not columns:
        return []
    usual = [column.usual[0] for column in columns]
    rows = zip(*(column.phrases for column in columns), strict=True)
    texts = [
        ", ".join(said for said, most in zip(row, usual, strict=True) if said and said != most)
        for row in rows
    ]
    cut = [
        textwrap.fill(text or "-", max(20, room), break_long_words=False, break_on_hyphens=False)
        for text in texts
    ]
    return [Column("changed", cut, right=False)]


def total(columns: Sequence[Column]) -> int:
    """Return the total width in characters of adjacent columns."""
    return sum(column.width for column in columns) + GAP * (len(columns) - 1)


def draw(columns: Sequence[Column], marked: Sequence[bool] = ()) -> Table:
    """Return the table, with `marked` rows in yellow."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, GAP, 0, 0))
    for column in columns:
        table.add_column(column.title, justify="right" if column.right else "left", width=column.width)
    for index in range(len(columns[0].cells)):
        style = "yellow" if marked and marked[index] else ""
        table.add_row(*(Text(column.cells[index], style=style) for column in columns))
    return table


def print_table(
    console: Console, ranks: Sequence[str], rows: Sequence[Mapping[str, Any]], figures: Sequence[Column]
) -> None:
    """Print the table of configurations with the settings in `rows`, and the values that `changed` omits."""
    columns, base = fitting(Column("#", ranks), setting_columns(rows, rows), figures, console.width)
    console.print(draw(columns))
    if base:
        console.print(Text(f"changed: the others have {base}", style="dim"))


def shared_words(ranks: Sequence[int | None]) -> list[str]:
    """Return ranks as text, with `=` for those that several rows share."""
    return ["-" if rank is None else f"{rank}{'=' * (ranks.count(rank) > 1)}" for rank in ranks]
