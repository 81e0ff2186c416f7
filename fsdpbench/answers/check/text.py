"""Format a comparison as text for a terminal, as Markdown for a job summary, and as JSON."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from fsdpbench.answers.check.compare import Change, Comparison, Finding, Verdict, diagnose
from fsdpbench.answers.check.metrics import METRICS
from fsdpbench.answers.check.records.entries import Entry
from fsdpbench.base.files.documents import rendered_beside, to_json
from fsdpbench.base.reading import one_line
from fsdpbench.engine.results.records import Status
from fsdpbench.reports.figures import Worse

SHOWN = (Verdict.WORSE, Verdict.UNKNOWN, Verdict.BETTER, Verdict.CHANGED, Verdict.ALLOWED)
_NAMED = 3


def as_text(comparison: Comparison, notes: Sequence[str] = ()) -> str:
    """Return the likely causes, then a table for each configuration: verdict, metric, both values, change."""
    return "\n".join([*changes_text(comparison, notes), summary(comparison)])


def changes_text(comparison: Comparison, notes: Sequence[str] = ()) -> list[str]:
    """Return the lines of `as_text` without the summary, its last line."""
    return _rendered("changes", comparison, notes).splitlines()


def _rendered(section: str, comparison: Comparison, notes: Sequence[str] = ()) -> str:
    """Return a section of the template `text.jinja`."""
    words = {"cell": _cell, "chance": _chance, "runs": _runs, "table": _table, "one_line": one_line}
    named = {each.__name__: each for each in (diagnose, finding_words, shown_pair, shown_percent, summary)}
    shown = [change for verdict in SHOWN for change in comparison.of(verdict)]
    given = {"section": section, "comparison": comparison, "notes": notes, "shown": shown, "verdicts": SHOWN}
    return rendered_beside(__file__, "text.jinja", **given, **words, **named)


def _table(changes: Sequence[Change]) -> list[str]:
    """Return aligned columns, the most important verdicts first; reasons, of any length, come last."""
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
    """Return the comparison as Markdown: the causes, then a table of the changes."""
    return _rendered("markdown", comparison, notes)


def as_json(comparison: Comparison, notes: Sequence[str] = ()) -> str:
    """Return the comparison as a JSON object; `changes` also includes measured figures within noise."""
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
    """Return the sentence of a finding with its configurations."""
    names = ", ".join(finding.configurations[:_NAMED])
    more = len(finding.configurations) - _NAMED
    return one_line(f"{finding.sentence} ({names}{f' and {more} more' if more > 0 else ''})")


def summary(comparison: Comparison) -> str:
    """Return a one-line summary: the number of compared configurations, and of each verdict."""
    return _rendered("summary", comparison).rstrip()


def _runs(changes: Sequence[Change]) -> str:
    counts = sorted({count for change in changes for count in change.runs})
    return str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def _record(change: Change) -> dict[str, object]:
    finite = change.relative is not None and math.isfinite(change.relative)
    record = asdict(change) | {"relative": change.relative if finite else None}
    return record | {"p": record.pop("chance")}


def _chance(change: Change) -> str:
    return "" if change.chance is None else f"{change.chance:.2g}"


def _cell(text: str) -> str:
    """Escape text so that it cannot end a cell of a Markdown table."""
    return one_line(text).replace("|", "\\|")


_MOST_DECIMALS = 17
_SMALLEST_PERCENT = 5e-5


def shown_pair(metric: str, before: Any, after: Any) -> tuple[str, str]:
    """Return both values in the metric's unit, with enough digits to show that they differ."""
    for extra in range(_MOST_DECIMALS):
        first, second = (_shown(metric, value, extra) for value in (before, after))
        if first != second or before == after:
            return first, second
    return repr(before), repr(after)


def shown_percent(relative: float | None) -> str:
    """Return a signed share in percent; empty if it is None or not finite."""
    if relative is None or not math.isfinite(relative):
        return ""
    if 0 < abs(relative) < _SMALLEST_PERCENT:
        return f"{relative * 100:+.1g}%"  # two decimals would show it as 0
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


# Figures in the format of github-action-benchmark (`tool: customSmallerIsBetter`), which charts them over
# commits: an array of {"name", "unit", "value", "range", "extra"}.


def as_github_benchmark(entries: Mapping[str, Entry]) -> str:
    """Return every figure of `entries` for which smaller is better (the format supports no other). `value` is
    the median over runs, `range` half the interquartile range."""
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
