"""Findings about a run for the page: the sanitizer's, differences between ranks, scripts' decisions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from fsdpbench.reports.pages.view import Configuration
from fsdpbench.reports.pages.whole_run import Table
from fsdpbench.reports.result import RaceFinding, RankDifference

_MOST_FINDINGS = 50


@dataclass(frozen=True, slots=True)
class Races:
    """All findings of a run folder, each with its configuration, and hints."""

    findings: Sequence[tuple[str, RaceFinding]]
    hints: Table | None


def races(rows: Sequence[Configuration]) -> Races | None:
    """Return the sanitizer's findings in all configurations; None where it did not run."""
    reports = [(row.name, row.result.sanitizer) for row in rows if row.result.sanitizer is not None]
    if not reports:
        return None
    found = [(name, finding) for name, report in reports for finding in report.findings]
    found.sort(key=lambda entry: -entry[1].count)
    hints = [
        (
            hint.kind.replace("_", " ")[:60],
            f"{hint.count:,}",
            (hint.stack or ["unknown"])[0][:120],
            hint.hint[:300],
        )
        for _, report in reports
        for hint in report.hints
    ]
    table = Table.of(("kind", "times", "where", "hint"), hints[:_MOST_FINDINGS])
    return Races(found[:_MOST_FINDINGS], table)


def rank_differences(rows: Sequence[Configuration]) -> list[tuple[str, RankDifference]]:
    """Return the first difference of each configuration whose ranks were compared, behind its name."""
    checks = ((row.name, row.result.rank_check) for row in rows)
    return [(name, check.difference) for name, check in checks if check and check.difference]


_MOST_ROWS = 200


def decisions_table(rows: Sequence[Configuration]) -> Table | None:
    """Return the decisions of all configurations, most frequent first; None where nothing was decided."""
    found = [(row.name, decision) for row in rows for decision in row.result.placeholder_decisions or ()]
    found.sort(key=lambda entry: -entry[1].count)
    lines = [
        (
            f"{PurePath(decision.file).name[:80]}:{decision.line}",
            decision.operation[:80],
            json.dumps(decision.answer)[:80],
            f"{decision.count:,}",
            name,
        )
        for name, decision in found[:_MOST_ROWS]
    ]
    if len(found) > _MOST_ROWS:
        lines.append((f"{len(found) - _MOST_ROWS} lines more", "", "", "", ""))
    return Table.of(("line of the script", "question", "answer", "times", "configuration"), lines)
