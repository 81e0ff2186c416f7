"""A comparison in words, for a terminal or as Markdown for a job's summary."""

from __future__ import annotations

import json
from typing import Any

from fsdpbench.check.compare import Change, Comparison, Verdict
from fsdpbench.check.metrics import METRICS


def as_text(comparison: Comparison) -> str:
    """Regressions first, each with configuration, metric, both values and the change."""
    lines = []
    for verdict in Verdict:
        lines += [f"{verdict.value:>7}  {_told(c)}" for c in comparison.changes if c.verdict is verdict]
    lines += [f"missing  {name}: in the baseline, not in this sweep" for name in comparison.missing]
    lines += [f"  added  {name}: in this sweep, not in the baseline" for name in comparison.added]
    return "\n".join([*lines, summary(comparison)])


def as_markdown(comparison: Comparison) -> str:
    rows = ["| | configuration | metric | before | after | change |", "|---|---|---|---|---|---|"]
    for change in sorted(comparison.changes, key=lambda c: list(Verdict).index(c.verdict)):
        relative = "" if change.relative is None else f"{change.relative:+.2%}"
        rows.append(
            f"| {change.verdict.value} | {change.configuration} | {change.metric} "
            f"| {_value(change.metric, change.before)} | {_value(change.metric, change.after)} | {relative} |"
        )
    body = "\n".join(rows) + "\n\n" if comparison.changes else ""
    return f"{body}{summary(comparison)}\n"


def as_json(comparison: Comparison) -> str:
    content: dict[str, Any] = {
        "schema": 1,
        "compared": comparison.compared,
        "regressions": len(comparison.regressions),
        "missing": comparison.missing,
        "added": comparison.added,
        "changes": [
            {
                "configuration": change.configuration,
                "metric": change.metric,
                "before": change.before,
                "after": change.after,
                "relative": change.relative,
                "verdict": change.verdict.value,
            }
            for change in comparison.changes
        ],
    }
    return json.dumps(content)


def summary(comparison: Comparison) -> str:
    """One line: how many were compared and what came of it."""
    better = sum(change.verdict is Verdict.BETTER for change in comparison.changes)
    worse = len(comparison.regressions)
    if not comparison.changes:
        return f"{comparison.compared} configurations compared: all figures are equal."
    told = f"{comparison.compared} configurations compared: {worse} figures worse, {better} better."
    if better and not worse:
        told += " Keep the gain: `fsdpbench baseline update` writes it down."
    return told


def _told(change: Change) -> str:
    relative = "" if change.relative is None else f" ({change.relative:+.2%})"
    before, after = (_value(change.metric, value) for value in (change.before, change.after))
    return f"{change.configuration}: {change.metric} {before} -> {after}{relative}"


def _value(metric: str, value: Any) -> str:
    if value is None:
        return "-"
    unit = METRICS[metric].unit if metric in METRICS else ""
    if unit == "s":
        return f"{value * 1e3:,.4f} ms"
    if unit == "B":
        return f"{value / 2**20:,.2f} MiB"
    return f"{value:g}" if isinstance(value, float) else str(value)
