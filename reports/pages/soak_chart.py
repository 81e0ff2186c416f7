"""Memory over the steps of a soak: peaks, what the allocator reserved, fragments, and where it retried."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fsdpbench.reports.pages import display
from fsdpbench.reports.pages.display import GIB
from fsdpbench.reports.pages.memory_chart import MemoryChart
from fsdpbench.reports.pages.whole_run import Table
from fsdpbench.reports.result import SoakReport

SOAK_WORDS = (
    "Lines of peak allocated memory, of reserved memory and of free memory in fragments over the steps of "
    "a soak, with allocator retries marked; the table below has the figures."
)
_LINES = (
    ("allocated", "peak allocated", "var(--compute)"),
    ("reserved", "peak reserved", "var(--muted)"),
    ("inactive_split", "free, in fragments", "var(--gather)"),
)


def soak_chart(soak: SoakReport, capacity: float | None, most_points: int = 1000) -> MemoryChart | None:
    """Return the chart of a soak, `most_points` points a line at most: of neighbours the highest is shown.

    None where the device keeps no account of memory, or no step was finished.
    """
    over = soak.over_steps
    if not over.reserved or None in over.reserved:
        return None
    width = -(-len(over.reserved) // most_points)
    steps = over.training_step[::width]
    lines = [
        _line(steps, _highest(getattr(over, name), width), words, colour) for name, words, colour in _LINES
    ]
    retried = [at for at, count in enumerate(over.alloc_retries) if count]
    if retried:
        lines.append(_retries(soak, retried[-most_points:]))
    layout: dict[str, Any] = {
        "height": 330,
        "xaxis": {"title": {"text": "training step"}, "zeroline": False},
        "yaxis": {"title": {"text": "GiB"}, "rangemode": "tozero"},
        "shapes": [],
    }
    if capacity:
        line = {"color": "var(--exposed)", "width": 1, "dash": "dash"}
        height = {"y0": capacity / GIB, "y1": capacity / GIB}
        layout["shapes"].append({"type": "line", "xref": "paper", "x0": 0, "x1": 1, "line": line, **height})
    return MemoryChart({"data": lines, "layout": layout, "narrow": {}}, _table(soak))


def _highest(values: Sequence[int | None], width: int) -> list[float]:
    return [
        round(max(value or 0 for value in values[at : at + width]) / GIB, 3)
        for at in range(0, len(values), width)
    ]


def _line(steps: Sequence[int], values: Sequence[float], words: str, colour: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": words,
        "x": list(steps),
        "y": list(values),
        "line": {"width": 1.4, "color": colour, "simplify": False},
        "hovertemplate": f"%{{y:.2f}} GiB {words} in step %{{x}}<extra></extra>",
    }


def _retries(soak: SoakReport, places: Sequence[int]) -> dict[str, Any]:
    over = soak.over_steps
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "allocator retry",
        "x": [over.training_step[at] for at in places],
        "y": [round((over.reserved[at] or 0) / GIB, 3) for at in places],
        "marker": {"symbol": "triangle-down", "size": 11, "color": "var(--exposed)"},
        "customdata": [display.count(over.alloc_retries[at]) for at in places],
        "hovertemplate": "step %{x}: %{customdata} retries<extra></extra>",
    }


def _table(soak: SoakReport) -> Table:
    over = soak.over_steps
    rows = []
    for words, values in (
        ("peak allocated", over.allocated),
        ("peak reserved", over.reserved),
        ("free, in fragments", over.inactive_split),
    ):
        known = [value or 0 for value in values]
        highest = known.index(max(known))
        rows.append((words, display.gib(known[highest]), str(over.training_step[highest])))
    for words, step in (
        ("last cudaMalloc", soak.last_device_alloc_step),
        (f"first of {soak.retries:,} allocator retries", soak.first_retry_step),
        ("out of memory", soak.out_of_memory_step),
    ):
        if step is not None:
            rows.append((words, "", str(step)))
    return Table(("what", "GiB", "in step"), tuple(rows))
