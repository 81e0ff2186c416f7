"""A comparison in words, for a terminal or as Markdown for a job's summary, and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from fsdpbench.check.compare import Change, Comparison, Verdict
from fsdpbench.check.diagnosis import Finding, diagnose
from fsdpbench.check.metrics import METRICS

SHOWN = (Verdict.WORSE, Verdict.BETTER, Verdict.CHANGED, Verdict.ALLOWED)
_NAMED = 3


def as_text(comparison: Comparison, notes: Sequence[str] = ()) -> str:
    """Likely causes, then a table for each configuration: verdict, metric, both values, the change."""
    lines = [f"cause: {told_finding(finding)}" for finding in diagnose(comparison)]
    shown = [change for change in comparison.changes if change.verdict in SHOWN]
    for name in dict.fromkeys(change.configuration for change in shown):
        lines += ["", f"{name}:", *_table([change for change in shown if change.configuration == name])]
    lines += [""] if lines else []
    lines += [f"missing: {name}: not on the newer side" for name in comparison.missing]
    lines += [f"added: {name}: on the newer side only" for name in comparison.added]
    lines += [f"note: {note}" for note in notes]
    return "\n".join([*lines, summary(comparison)])


def _table(changes: Sequence[Change]) -> list[str]:
    """Aligned columns, the most pressing verdicts first."""
    rows = [
        (
            change.verdict.value,
            change.metric,
            _value(change.metric, change.before),
            _value(change.metric, change.after),
            _percent(change),
            f"p {_chance(change)}" if change.chance is not None else "",
        )
        for change in sorted(changes, key=lambda each: SHOWN.index(each.verdict))
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    texts = []
    for row in rows:
        words = [row[0].ljust(widths[0]), row[1].ljust(widths[1])]
        numbers = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
        texts.append("  " + "  ".join(words + numbers).rstrip())
    return texts


def as_markdown(comparison: Comparison, notes: Sequence[str] = ()) -> str:
    causes = [f"- **{finding.cause}**: {_cell(told_finding(finding))}" for finding in diagnose(comparison)]
    shown = [change for verdict in SHOWN for change in comparison.of(verdict)]
    rows = ["| | configuration | metric | before | after | change | p |", "|---|---|---|---|---|---|---|"]
    rows += [
        f"| {change.verdict.value} | {_cell(change.configuration)} | {change.metric} "
        f"| {_value(change.metric, change.before)} | {_value(change.metric, change.after)} "
        f"| {_percent(change)} | {_chance(change)} |"
        for change in shown
    ]
    only = [f"- missing, not on the newer side: {_cell(name)}" for name in comparison.missing]
    only += [f"- added, on the newer side only: {_cell(name)}" for name in comparison.added]
    blocks = [causes, rows if shown else [], only, [f"> {note}" for note in notes], [summary(comparison)]]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def as_json(comparison: Comparison, notes: Sequence[str] = ()) -> str:
    """One object; `changes` holds measured figures within noise as well."""
    content: dict[str, Any] = {
        "schema": 1,
        "compared": comparison.compared,
        "regressions": len(comparison.regressions),
        "missing": comparison.missing,
        "added": comparison.added,
        "notes": list(notes),
        "causes": [
            {
                "cause": finding.cause,
                "sentence": finding.sentence,
                "configurations": finding.configurations,
            }
            for finding in diagnose(comparison)
        ],
        "changes": [_record(change) for change in comparison.changes],
    }
    return json.dumps(content, allow_nan=False)


def told_finding(finding: Finding) -> str:
    """The sentence, and where it was found."""
    names = ", ".join(finding.configurations[:_NAMED])
    more = len(finding.configurations) - _NAMED
    return f"{finding.sentence} ({names}{f' and {more} more' if more > 0 else ''})"


def summary(comparison: Comparison) -> str:
    """One line: how many were compared and what came of it."""
    worse, better = len(comparison.regressions), len(comparison.of(Verdict.BETTER))
    noun = "configuration" if comparison.compared == 1 else "configurations"
    if not comparison.changes:
        return f"{comparison.compared} {noun} compared: all figures are equal."
    figures = "figure" if worse == 1 else "figures"
    told = f"{comparison.compared} {noun} compared: {worse} {figures} worse, {better} better."
    noise = comparison.of(Verdict.NOISE)
    if noise:
        told += f" {len(noise)} measured figures show no change ({_runs(noise)} runs a side)."
    if better and not worse:
        told += " Keep the gain: `fsdpbench baseline update` writes it down."
    return told


def _runs(changes: Sequence[Change]) -> str:
    counts = sorted({count for change in changes for count in change.runs})
    return str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def _record(change: Change) -> dict[str, Any]:
    finite = change.relative is not None and math.isfinite(change.relative)
    return {
        "configuration": change.configuration,
        "metric": change.metric,
        "before": change.before,
        "after": change.after,
        "relative": change.relative if finite else None,
        "p": change.chance,
        "runs": list(change.runs),
        "verdict": change.verdict.value,
    }


def _percent(change: Change) -> str:
    if change.relative is None or not math.isfinite(change.relative):
        return ""
    return f"{change.relative:+.2%}"


def _chance(change: Change) -> str:
    return "" if change.chance is None else f"{change.chance:.2g}"


def _value(metric: str, value: Any) -> str:
    if value is None:
        return "-"
    unit = METRICS[metric].unit if metric in METRICS else ""
    if unit == "s":
        return f"{value * 1e3:,.4f} ms"
    if unit == "B":
        return f"{value / 2**20:,.2f} MiB"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _cell(text: str) -> str:
    """Text that cannot end a table's cell."""
    return text.replace("|", "\\|").replace("\n", " ")
