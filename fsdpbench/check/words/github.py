"""Figures in the shape that github-action-benchmark reads (`tool: customSmallerIsBetter`), to chart them over
commits: an array of {"name", "unit", "value", "range", "extra"}.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from statistics import median

from fsdpbench.check.metrics import METRICS
from fsdpbench.check.records.entries import Entry
from fsdpbench.reports.figures import Worse
from fsdpbench.results.records import Status


def as_github_benchmark(entries: Mapping[str, Entry]) -> str:
    """Every figure of `entries` that gets worse as it grows (the format knows no other); medians over runs,
    `range` their quartiles' half distance."""
    rows = []
    for name, entry in entries.items():
        if entry.status is not Status.OK:
            continue
        for metric in METRICS.values():
            values = entry.values(metric.name)
            if values and metric.worse is Worse.HIGHER:
                rows.append(_row(name, metric.name, metric.unit, values))
    return json.dumps(rows, indent=1)


def _row(configuration: str, metric: str, unit: str, values: list[float]) -> dict[str, object]:
    row: dict[str, object] = {
        "name": f"{configuration}: {metric}",
        "unit": unit or "count",
        "value": median(values),
    }
    if len(values) > 1:
        ordered = sorted(values)
        half = (ordered[(3 * len(ordered)) // 4] - ordered[len(ordered) // 4]) / 2
        row["range"] = f"± {half:g}"
    row["extra"] = f"{len(values)} runs" if len(values) > 1 else "1 run"
    return row
