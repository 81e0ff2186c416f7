"""Why the device was idle, in a mean step."""

from __future__ import annotations

from fsdpbench.reports.analysis import RankAnalysis
from fsdpbench.reports.page import display
from fsdpbench.reports.page.charts.whole_run import Table

WORDS = {
    "allocator": "the CPU in the driver's allocation calls",
    "rate_limiter": "the CPU waiting for the rate limiter",
    "synchronization": "the CPU waiting for the device otherwise",
    "cpu": "the CPU not that far: next work not launched yet",
    "launch_latency": "launched work on its way",
    "event": "launched work waiting for an event",
}


def idle_table(analysis: RankAnalysis) -> Table | None:
    """The causes with their times and their share of the step; None where the trace does not tell them."""
    parts = analysis.idle_causes.parts()
    if not parts or not analysis.time.total:
        return None
    steps = max(len(analysis.steps), 1)
    rows = [
        (WORDS[name], display.ms(ns / steps / 1e6), display.percent(ns / analysis.time.total))
        for name, ns in sorted(parts.items(), key=lambda item: -item[1])
        if ns
    ]
    return Table(("idle because of", "ms a step", "of the step"), tuple(rows)) if rows else None
