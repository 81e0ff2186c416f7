"""The summary of a sweep in a terminal: the verdict in three lines, the best rows, failures, the report."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fsdpbench.base.reading import printable
from fsdpbench.cli.output import make_console
from fsdpbench.cli.terminal.table import Column, draw, fitting, setting_columns, shared_words
from fsdpbench.cli.terminal.units import interval_lines
from fsdpbench.reports.pages import best_lines, load_run, ranking
from fsdpbench.reports.pages.comparisons import Ratio, differences, ratios
from fsdpbench.reports.pages.display import NOTHING, percent
from fsdpbench.reports.pages.ranking import figures
from fsdpbench.reports.pages.recommendation import endings
from fsdpbench.reports.pages.view import Configuration, RunView, Status
from fsdpbench.reports.result import Cause

_MOST_ROWS = 10
"""Rows shown in a terminal; the report and piped output have all rows."""
_FAILURES = (
    Status.ERROR, Status.CRASH, Status.TIMEOUT, Status.RANK_MISMATCH, Status.RACE, Status.UNREADABLE
)  # fmt: skip


def print_ranking(folder: Path, *, ran: int, already_done: int) -> None:
    """Print the ranking of the run in `folder`. `ran`, `already_done`: numbers of configurations."""
    view = load_run(folder)
    console = make_console()
    entries = sorted(ranking.rank(view), key=_order)
    listed = entries[:_MOST_ROWS] if console.is_terminal else entries
    for line in best_lines(view):
        console.print(Text(line, style="bold"))
    console.print()
    shared = shared_words([entry.rank for entry in entries])
    settings = setting_columns(
        [entry.row.settings for entry in entries], [entry.row.settings for entry in listed]
    )
    figures = _figures(ranking.metric_of(view), listed, entries) if entries else []
    columns, base = fitting(Column("#", shared[: len(listed)]), settings, figures, console.width)
    console.print(draw(columns, [entry.row.status is not Status.OK for entry in listed]))
    if len(entries) > len(listed):
        rest = entries[len(listed) :]
        ended = f": {endings([entry.row for entry in rest])}" if rest[-1].throughput is None else ""
        console.print(Text(f"… and {len(rest)} more in the report{ended}", style="dim"))
    if base:
        console.print(Text(f"changed: the others have {base}", style="dim"))
    print_side_by_side(console, view)
    _print_failures(console, view)
    _print_doubts(console, [entry.row for entry in entries])
    _print_intervals(console, entries, shared)
    known = f" ({already_done} were done already)" if already_done else ""
    written = f" Report: {page}" if (page := folder / "report.html").exists() else ""
    console.print()
    console.print(f"{ran} configurations ran{known}.{written}", highlight=False, soft_wrap=True)


def _order(entry: ranking.Ranked) -> tuple[bool, int, bool, int]:
    """Return the sort key of a row: by rank; torch's systems before ours within a rank."""
    ours = entry.row.system.startswith("impl-")
    return entry.rank is None, entry.rank or 0, ours, entry.place or 0


def _figures(
    metric: ranking.Metric, entries: Sequence[ranking.Ranked], ranked: Sequence[ranking.Ranked]
) -> list[Column]:
    """Return columns of figures; the first shows the status of rows without figures."""
    first, *rest = figures(metric)
    found = ranking.chosen(ranked)
    best = found.torchs or found.ours or ranked[0]

    def column(figure: ranking.Shown) -> Column:
        is_memory = figure.name.startswith("reserved")  # marked if it may not fit
        cells = [
            figure.text(figure.value(row)) + " risky" * (is_memory and ranking.is_risky(row))
            if row.status is Status.OK
            else ""
            for row in (entry.row for entry in entries)
        ]
        return Column(figure.name, cells, weight=figure.weight)

    speeds = [
        f"{entry.throughput or 0:,.0f}" if entry.row.status is Status.OK else entry.row.status.words
        for entry in entries
    ]
    behind = [
        ranking.paired(entry, best).brief if entry.throughput and entry is not best else ""
        for entry in entries
    ]
    columns = [
        Column(first.name.replace("/", " /", 1), speeds),
        Column("against the verdict's", behind, weight=9),
    ]
    columns += [column(figure) for figure in rest if figure.weight]
    columns = [each for each in columns if not each.title.endswith("±") or len(set(each.cells) - {""}) > 1]
    columns.insert(3, Column("spread", [_spread(entry.row) for entry in entries], weight=4))
    return [column for column in columns if column.weight == 0 or set(column.cells) - {"", NOTHING, "0"}]


def _spread(row: Configuration) -> str:
    """Return the spread of a configuration's runs or steps; empty for simulated ones."""
    if row.simulated or row.status is not Status.OK:
        return ""
    source = row.result.repeats or row.result.measured
    return percent(source.spread if source else None)


def _print_doubts(console: Console, rows: Sequence[Configuration]) -> None:
    """Print doubts about figures, each once, and those of one row per simulated machine."""
    finished = [row for row in rows if row.status is Status.OK]
    machines = {(row.hardware.get("name"), row.result.software): row for row in finished if row.simulated}
    measured = [row for row in finished if not row.simulated]
    doubtful = [row.result.warnings for row in measured if row.result.warnings]
    lines = [text for row in machines.values() for text in row.result.warnings]
    if doubtful:
        kinds = dict.fromkeys(text.split(":")[0] for warnings in doubtful for text in warnings)
        lines.append(f"{len(doubtful)} of {len(measured)} measured: {'; '.join(kinds)}")
    if not lines:
        return
    console.print()
    for line in dict.fromkeys(lines):
        console.print(Text(printable(f"Doubtful: {line}"), style="yellow"), soft_wrap=True)
    console.print("  environment.warnings in each result.json tells more.", highlight=False)


def _print_intervals(console: Console, entries: Sequence[ranking.Ranked], shared: Sequence[str]) -> None:
    """Print what the intervals mean, and why they are wide."""
    intervals = [entry.row.result.interval for entry in entries]
    risky = any(ranking.is_risky(entry.row) for entry in entries)
    console.print()
    for line in interval_lines(intervals, shared=any("=" in each for each in shared), risky=risky):
        console.print(line, highlight=False)


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


def print_side_by_side(console: Console, view: RunView) -> None:
    """Print the systems of the run in `view`, if there are several, and any differences that are wrong."""
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
    for place in range(4):
        table.add_column(justify="right" if place == 1 else "left", no_wrap=True)
    for ratio in found:
        spread = f"({ratio.low:.2f} to {ratio.high:.2f})" if ratio.rounds > 1 else ""
        losses = "" if ratio.losses == "-" else f"losses {ratio.losses}"
        style = "red" if ratio.losses == "differ" else ""
        table.add_row(
            Text(ratio.system), Text(f"{ratio.ratio:.2f}x"), Text(spread), Text(losses, style=style)
        )
    return table
