"""The end of a sweep on a terminal: the ranked table, what failed, the recommendation, where the report is.

The table fits the terminal: of its columns the least important go first, and where even the settings do not
fit side by side they become one column that may be folded. No figure is ever cut.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fsdpbench.base.reading import printable
from fsdpbench.cli.output import make_console
from fsdpbench.reports.pages import best_sentence, load_run
from fsdpbench.reports.pages.display import NOTHING, percent
from fsdpbench.reports.pages.ranking import Metric, Ranked, is_risky, metric_of, rank, varying_settings
from fsdpbench.reports.pages.ranking_table import Shown, figures
from fsdpbench.reports.pages.side_by_side import Ratio, differences, ratios
from fsdpbench.reports.pages.view import Configuration, RunView, Status
from fsdpbench.reports.result import Cause

_GAP = 2
_MOST_ROWS = 30
"""On a terminal; the report and a pipe have all of them."""
_FAILURES = (
    Status.ERROR, Status.CRASH, Status.TIMEOUT, Status.RANK_MISMATCH, Status.RACE, Status.UNREADABLE
)  # fmt: skip


@dataclass(frozen=True)
class _Column:
    """`weight`: the columns with the least are left out first where there is no room; 0 is never left out."""

    header: str
    cells: Sequence[str]
    right: bool = True
    weight: int = 0

    @property
    def width(self) -> int:
        lines = [*self.header.split(), *(line for cell in self.cells for line in cell.splitlines())]
        return max(map(len, lines), default=1)


def print_ranking(folder: Path, *, ran: int, already_done: int) -> None:
    """Print the ranking of the run in `folder`. `ran`, `already_done`: numbers of configurations."""
    view = load_run(folder)
    console = make_console()
    entries = rank(view)
    rows = [entry.row for entry in entries]
    listed = entries[:_MOST_ROWS] if console.is_terminal else entries
    shown = [entry.row for entry in listed]
    shared = Counter(str(entry.rank) for entry in entries)
    ranks = [_rank(str(entry.rank), shared) if entry.row.status is Status.OK else "-" for entry in listed]
    found = _figures(metric_of(view), listed)
    columns = fitting(_Column("#", ranks), _settings(rows, shown), found, console.width)
    if console.is_terminal:
        console.print()
    console.print(_table(columns, shown))
    if len(rows) > len(shown):
        console.print(Text(f"… and {len(rows) - len(shown)} more, all of them in the report", style="dim"))
    print_side_by_side(console, view)
    _print_failures(console, view)
    _print_doubts(console, rows)
    _print_intervals(console, rows, shared)
    console.print()
    console.print(Text(best_sentence(view), style="bold"), soft_wrap=not console.is_terminal)
    known = f" ({already_done} were done already)" if already_done else ""
    console.print(
        f"{ran} configurations ran{known}. Report: {folder / 'report.html'}", highlight=False, soft_wrap=True
    )


def fitting(
    place: _Column, settings: Sequence[_Column], figures: Sequence[_Column], width: int
) -> list[_Column]:
    """Return the columns that fit into `width` characters, in their order."""
    kept = [place, *settings, *figures]
    for weight in sorted({column.weight for column in figures} - {0}):
        if _total(kept) <= width:
            return kept
        kept = [column for column in kept if column.weight != weight]
    if _total(kept) <= width or not settings:
        return kept
    # Not even the settings fit side by side: one column of them, folded where it must be.
    rows = zip(*(column.cells for column in settings), strict=True)
    folded = [" ".join(_named(settings, row)) for row in rows]
    others = [place, *(column for column in figures if column.weight == 0)]
    room = max(20, width - _total(others) - _GAP)
    cut = [textwrap.fill(text, room, break_long_words=False, break_on_hyphens=False) for text in folded]
    return [place, _Column("configuration", cut, right=False), *others[1:]]


def _rank(rank: str, shared: Counter[str]) -> str:
    """Return the rank, marked where others share it."""
    return f"{rank}=" if shared[rank] > 1 else rank


def _settings(rows: Sequence[Configuration], shown: Sequence[Configuration]) -> list[_Column]:
    names = [name for name in varying_settings(list(rows)) if name != "model"]
    return [
        _Column(name.replace("_", " "), [_shown(row.settings.get(name)) for row in shown], right=False)
        for name in names
    ]


def _figures(metric: Metric, entries: Sequence[Ranked]) -> list[_Column]:
    """Return columns of figures; a row without figures has its status in the first."""
    first, *rest = figures(metric)

    def column(figure: Shown) -> _Column:
        cells = [_figure(entry.row, figure) if entry.row.status is Status.OK else "" for entry in entries]
        return _Column(figure.name, cells, weight=figure.weight)

    speeds = [
        f"{entry.throughput or 0:,.0f}" if entry.row.status is Status.OK else entry.row.status.words
        for entry in entries
    ]
    columns = [_Column(first.name, speeds), *(column(figure) for figure in rest if figure.weight)]
    columns.insert(3, _Column("spread", [_spread(entry.row) for entry in entries], weight=4))
    return [column for column in columns if column.weight == 0 or set(column.cells) - {"", NOTHING, "0"}]


def _figure(row: Configuration, figure: Shown) -> str:
    """Return a cell; memory that may not fit is marked."""
    return figure.text(figure.value(row)) + " risky" * (figure.name.startswith("reserved") and is_risky(row))


def _spread(row: Configuration) -> str:
    """Return the spread of a configuration's runs, or of its steps; empty for simulated ones."""
    if row.simulated or row.status is not Status.OK:
        return ""
    source = row.result.repeats or row.result.measured
    return percent(source.spread if source else None)


def _print_doubts(console: Console, rows: Sequence[Configuration]) -> None:
    """Print what makes figures doubtful, each doubt once, and one row for each simulated machine."""
    finished = [row for row in rows if row.status is Status.OK]
    machines = {(row.hardware.get("name"), row.result.software): row for row in finished if row.simulated}
    measured = [row for row in finished if not row.simulated]
    doubtful = [warnings for row in measured if (warnings := _warnings(row))]
    lines = [text for row in machines.values() for text in _warnings(row)]
    if doubtful:
        kinds = dict.fromkeys(text.split(":")[0] for warnings in doubtful for text in warnings)
        lines.append(f"{len(doubtful)} of {len(measured)} measured: {'; '.join(kinds)}")
    if not lines:
        return
    console.print()
    for line in dict.fromkeys(lines):
        console.print(Text(f"Doubtful: {line}", style="yellow"), soft_wrap=True)
    console.print("  environment.warnings in each result.json tells more.", highlight=False)


def _warnings(row: Configuration) -> list[str]:
    return [printable(text) for text in row.result.warnings]


def _print_intervals(console: Console, rows: Sequence[Configuration], shared: Counter[str]) -> None:
    """Print the source of the intervals, and what makes them wide."""
    known = [row.result.interval for row in rows if row.result.interval is not None]
    if not known:
        return
    reasons = dict.fromkeys(reason for interval in known for reason in interval.because)
    source = "90 % ±: from held-out errors of published runs (docs/validation.md)"
    console.print()
    console.print(f"{source}; wide: {'; '.join(reasons)}." if reasons else f"{source}.", highlight=False)
    if any(rank != "None" and count > 1 for rank, count in shared.items()):
        apart = max(interval.apart for interval in known)
        console.print(f"Ranks with = cannot be distinguished: within {apart:.1%}.", highlight=False)
    risky = sum(interval.risky for interval in known)
    if risky:
        console.print(
            f"{risky} {'is' if risky == 1 else 'are'} risky: memory fits only inside its error, or the "
            "allocator retries.",
            highlight=False,
        )


def _print_failures(console: Console, view: RunView) -> None:
    failed = view.with_status(*_FAILURES)
    if not failed:
        return
    console.print()
    console.print(Text(f"{len(failed)} failed:", style="bold red"))
    for row in failed:
        log = row.result.cause.log if isinstance(row.result.cause, Cause) else None
        where = f"  ({row.folder / log})" if log else ""
        reason = row.problem or row.result.message or "no cause is known"
        console.print(Text(f"  {row.name}: {row.status.words}: {reason}{where}"), soft_wrap=True)
    console.print("  --retry-failed runs them again.", highlight=False)


def _table(columns: Sequence[_Column], shown: Sequence[Configuration]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, _GAP, 0, 0))
    for column in columns:
        table.add_column(column.header, justify="right" if column.right else "left", width=column.width)
    for index, row in enumerate(shown):
        style = "" if row.status is Status.OK else "yellow"
        table.add_row(*(Text(column.cells[index], style=style) for column in columns))
    return table


def _total(columns: Sequence[_Column]) -> int:
    return sum(column.width for column in columns) + _GAP * (len(columns) - 1)


def _named(settings: Sequence[_Column], values: Sequence[str]) -> list[str]:
    pairs = zip(settings, values, strict=True)
    return [value if c.header == "system" else f"{c.header.replace(' ', '_')}={value}" for c, value in pairs]


def _shown(value: object) -> str:
    if value is None:
        return "-"
    return str(value).lower() if isinstance(value, bool) else str(value)


def print_side_by_side(console: Console, view: RunView) -> None:
    """Print the systems of the run in `view`, if there are several, and what is wrong with any."""
    found = ratios(view)
    if found:
        console.print()
        console.print(Text(_headline(found[0], view), style="bold"))
        console.print(_ratio_table(found))
    for difference in differences(view):
        console.print(Text(difference.sentence, style="bold red"), soft_wrap=True)


def _headline(first: Ratio, view: RunView) -> str:
    rounds = (
        f", over {first.rounds} rounds" if first.rounds > 1 else "" if view.simulated else ", one run each"
    )
    return f"Throughput against {first.reference}, each system's best on the same work{rounds}:"


def _ratio_table(found: list[Ratio]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    for justify in ("left", "right", "left", "left"):
        table.add_column(justify="right" if justify == "right" else "left", no_wrap=True)
    for ratio in found:
        spread = f"({ratio.low:.2f} to {ratio.high:.2f})" if ratio.rounds > 1 else ""
        losses = "" if ratio.losses == "-" else f"losses {ratio.losses}"
        style = "red" if ratio.losses == "differ" else ""
        table.add_row(
            Text(ratio.system), Text(f"{ratio.ratio:.2f}x"), Text(spread), Text(losses, style=style)
        )
    return table
