"""The end of a sweep that compared systems: each against a reference, with its spread and its losses."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fsdpbench.reports.pages.side_by_side import Ratio, differences, ratios
from fsdpbench.reports.pages.view import RunView


def print_side_by_side(console: Console, view: RunView) -> None:
    """Print the systems of the run in `view`, if there are several, and what is wrong with any."""
    found = ratios(view)
    if found:
        console.print()
        console.print(Text(_headline(found[0], view), style="bold"))
        console.print(_table(found))
    for difference in differences(view):
        console.print(Text(difference.sentence, style="bold red"), soft_wrap=True)


def _headline(first: Ratio, view: RunView) -> str:
    rounds = (
        f", over {first.rounds} rounds" if first.rounds > 1 else "" if view.simulated else ", one run each"
    )
    return f"Throughput against {first.reference}, each system's best on the same work{rounds}:"


def _table(found: list[Ratio]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    for justify in ("left", "right", "left", "left"):
        table.add_column(justify="right" if justify == "right" else "left", no_wrap=True)
    for each in found:
        spread = f"({each.low:.2f} to {each.high:.2f})" if each.rounds > 1 else ""
        losses = "" if each.losses == "-" else f"losses {each.losses}"
        style = "red" if each.losses == "differ" else ""
        table.add_row(Text(each.system), Text(f"{each.ratio:.2f}x"), Text(spread), Text(losses, style=style))
    return table
