"""The end of a sweep on a terminal: the ranked table, the recommendation, where the report lies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from reports.page import best_sentence, load_run
from reports.page.ranking import metric_of, rank, varying_settings
from reports.page.view import Status

_GIB = 2**30


def print_ranking(folder: Path, *, ran: int, already_done: int) -> None:
    """Print to stdout what came of the run in `folder`."""
    view = load_run(folder)
    ranked = rank(view)
    console = Console()
    if not console.is_terminal:
        console = Console(width=200, no_color=True, highlight=False)
    varying = [name for name in varying_settings([entry.row for entry in ranked]) if name != "model"]
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("#", justify="right")
    for name in varying:
        table.add_column(name.replace("_", " "))
    for header in (
        metric_of(view).words,
        "ms/step",
        "TFLOPS/GPU",
        "MFU",
        "overlap",
        "peak GiB",
        "retries/step",
    ):
        table.add_column(header, justify="right")
    for place, entry in enumerate(ranked, start=1):
        row = entry.row
        settings = [_shown(row.settings.get(name)) for name in varying]
        if row.status is not Status.OK:
            table.add_row("-", *settings, Text(row.status.words, style="yellow"), *[""] * 6)
            continue
        result = row.result
        memory: Any = result.peak_memory_bytes or {}
        reserved = memory.get("reserved") if isinstance(memory, dict) else memory.reserved
        table.add_row(
            str(place),
            *settings,
            f"{entry.throughput or 0:,.0f}",
            f"{(result.step_time_s or 0) * 1e3:,.1f}",
            _number(result.tflops_per_gpu, ".1f"),
            _number(result.mfu, ".1%"),
            _number(result.overlap_fraction, ".0%"),
            _number(reserved / _GIB if reserved else None, ".1f"),
            _number(result.alloc_retries_per_step, "g"),
        )
    console.print(table)
    console.print()
    console.print(Text(best_sentence(view), style="bold"))
    known = f" ({already_done} were done already)" if already_done else ""
    console.print(f"{ran} configurations ran{known}. Report: {folder / 'report.html'}", highlight=False)


def _shown(value: object) -> str:
    if value is None:
        return "-"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
