"""A comparison in words, for a terminal or as Markdown for a job's summary, and as JSON."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from fsdpbench.answers.check.compare import Change, Comparison, Finding, Verdict, diagnose
from fsdpbench.answers.check.metrics import METRICS
from fsdpbench.answers.check.records.entries import Entry
from fsdpbench.base.files.documents import to_json
from fsdpbench.base.reading import one_line
from fsdpbench.engine.results.records import Status
from fsdpbench.reports.figures import Worse

SHOWN = (Verdict.WORSE, Verdict.UNKNOWN, Verdict.BETTER, Verdict.CHANGED, Verdict.ALLOWED)
_NAMED = 3


def as_text(comparison: Comparison, notes: Sequence[str] = ()) -> str:
    """Return the likely causes, then a table a configuration: verdict, metric, both values, the change."""
    return "\n".join([*changes_text(comparison, notes), summary(comparison)])


def changes_text(comparison: Comparison, notes: Sequence[str] = ()) -> list[str]:
    """Return the lines of `as_text` without the last, which counts them."""
    lines = [f"cause: {finding_words(finding)}" for finding in diagnose(comparison)]
    shown = [change for change in comparison.changes if change.verdict in SHOWN]
    for name in dict.fromkeys(change.configuration for change in shown):
        of_name = [change for change in shown if change.configuration == name]
        lines += ["", f"{one_line(name)}:", *_table(of_name)]
    lines += [""] if lines else []
    lines += [f"unknown: {one_line(name)}: {one_line(why)}" for name, why in comparison.absent.items()]
    lines += [f"missing: {one_line(name)}: not on the newer side" for name in comparison.missing]
    lines += [f"added: {one_line(name)}: on the newer side only" for name in comparison.added]
    return lines + [f"note: {one_line(note)}" for note in notes]


def _table(changes: Sequence[Change]) -> list[str]:
    """Return aligned columns, the most pressing verdicts first; reasons, of any length, come last."""
    ordered = sorted(changes, key=lambda each: SHOWN.index(each.verdict))
    rows = [
        (
            change.verdict.value,
            change.metric,
            *shown_pair(change.metric, change.before, change.after),
            shown_percent(change.relative),
            f"p {_chance(change)}" if change.chance is not None else "",
        )
        for change in ordered
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    texts = []
    for row, change in zip(rows, ordered, strict=True):
        words = [row[0].ljust(widths[0]), row[1].ljust(widths[1])]
        numbers = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
        reason = [one_line(change.reason)] if change.reason else []
        texts.append("  " + "  ".join(words + numbers + reason).rstrip())
    return texts


def as_markdown(comparison: Comparison, notes: Sequence[str] = ()) -> str:
    """Return the comparison as Markdown: the causes, then a table of what changed."""
    causes = [f"- **{finding.cause}**: {_cell(finding_words(finding))}" for finding in diagnose(comparison)]
    shown = [change for verdict in SHOWN for change in comparison.of(verdict)]
    head = "| | configuration | metric | before | after | change | p | why |"
    rows = [head, "|---|---|---|---|---|---|---|---|"]
    for change in shown:
        before, after = shown_pair(change.metric, change.before, change.after)
        rows.append(
            f"| {change.verdict.value} | {_cell(change.configuration)} | {change.metric} "
            f"| {_cell(before)} | {_cell(after)} "
            f"| {shown_percent(change.relative)} | {_chance(change)} | {_cell(change.reason or '')} |"
        )
    only = [f"- unknown: {_cell(name)}: {_cell(why)}" for name, why in comparison.absent.items()]
    only += [f"- missing, not on the newer side: {_cell(name)}" for name in comparison.missing]
    only += [f"- added, on the newer side only: {_cell(name)}" for name in comparison.added]
    quoted = [f"> {_cell(note)}" for note in notes]
    blocks = [causes, rows if shown else [], only, quoted, [summary(comparison)]]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def as_json(comparison: Comparison, notes: Sequence[str] = ()) -> str:
    """Return one object; `changes` holds measured figures within noise as well."""
    content = {
        "schema": 1,
        "compared": comparison.compared,
        "regressions": len(comparison.regressions),
        "missing": comparison.missing,
        "added": comparison.added,
        "added_failed": comparison.added_failed,
        "cannot_judge": comparison.unjudged,
        "notes": list(notes),
        "causes": [asdict(finding) for finding in diagnose(comparison)],
        "changes": [_record(change) for change in comparison.changes],
    }
    return to_json(content, allow_nan=False)


def finding_words(finding: Finding) -> str:
    """Return the sentence, and where it was found."""
    names = ", ".join(finding.configurations[:_NAMED])
    more = len(finding.configurations) - _NAMED
    return one_line(f"{finding.sentence} ({names}{f' and {more} more' if more > 0 else ''})")


def summary(comparison: Comparison) -> str:
    """Return one line: how many were compared and what came of it."""
    worse, better = len(comparison.regressions), len(comparison.of(Verdict.BETTER))
    unjudged = len(comparison.unjudged)
    noun = "configuration" if comparison.compared == 1 else "configurations"
    if not comparison.changes and not unjudged:
        return f"{comparison.compared} {noun} compared: all figures are equal."
    figures = "figure" if worse == 1 else "figures"
    text = f"{comparison.compared} {noun} compared: {worse} {figures} worse, {better} better."
    if unjudged:
        text += f" {unjudged} cannot be judged."
    noise = comparison.of(Verdict.NOISE)
    if noise:
        counts = sorted({count for change in noise for count in change.runs})
        runs = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        text += f" {len(noise)} measured figures show no change ({runs} runs a side)."
    if better and not worse and not unjudged:
        text += " Keep the gain: `fsdpbench baseline update` writes it down."
    return text


def _record(change: Change) -> dict[str, object]:
    finite = change.relative is not None and math.isfinite(change.relative)
    record = asdict(change) | {"relative": change.relative if finite else None}
    return record | {"p": record.pop("chance")}


def _chance(change: Change) -> str:
    return "" if change.chance is None else f"{change.chance:.2g}"


def _cell(text: str) -> str:
    """Return text for a cell of a Markdown table, which it cannot end."""
    return one_line(text).replace("|", "\\|")


_MOST_DECIMALS = 17
_SMALLEST_PERCENT = 5e-5


def shown_pair(metric: str, before: Any, after: Any) -> tuple[str, str]:
    """Return both in the metric's unit, with as many digits as show that they differ."""
    for extra in range(_MOST_DECIMALS):
        first, second = (_shown(metric, value, extra) for value in (before, after))
        if first != second or before == after:
            return first, second
    return repr(before), repr(after)


def shown_percent(relative: float | None) -> str:
    """Return a signed share in percent; empty where there is none to tell."""
    if relative is None or not math.isfinite(relative):
        return ""
    if 0 < abs(relative) < _SMALLEST_PERCENT:
        return f"{relative * 100:+.1g}%"  # two decimals would tell it as none
    return f"{relative:+.2%}"


def _shown(metric: str, value: Any, extra: int) -> str:
    """Return a figure in its unit, with `extra` more decimals than usual."""
    if value is None:
        return "-"
    unit = METRICS[metric].unit if metric in METRICS else ""
    if unit == "s":
        return f"{value * 1e3:,.{4 + extra}f} ms"
    if unit == "B":
        return f"{value / 2**20:,.{2 + extra}f} MiB"
    return f"{value:.{6 + extra}g}" if isinstance(value, float) else str(value)


# Figures in the shape that github-action-benchmark reads (`tool: customSmallerIsBetter`), to chart them over
# commits: an array of {"name", "unit", "value", "range", "extra"}.


def as_github_benchmark(entries: Mapping[str, Entry]) -> str:
    """Return every figure of `entries` that gets worse as it grows (the format knows no other); medians over
    runs, `range` their quartiles' half distance."""
    return to_json(
        [
            _row(f"{name}: {metric.name}", metric.unit or "count", values)
            for name, entry in entries.items()
            for metric in METRICS.values()
            if entry.status is Status.OK
            and metric.worse is Worse.HIGHER
            and (values := entry.values(metric.name))
        ],
        1,
    )


def _row(name: str, unit: str, values: list[float]) -> dict[str, object]:
    ordered, count = sorted(values), len(values)
    half = (ordered[(3 * count) // 4] - ordered[count // 4]) / 2
    spread = {"range": f"± {half:g}"} if count > 1 else {}
    runs = "1 run" if count == 1 else f"{count} runs"
    return {"name": name, "unit": unit, "value": median(values), **spread, "extra": runs}
