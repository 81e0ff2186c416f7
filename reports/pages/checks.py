"""Findings about a run for the page: the sanitizer's, differences between ranks, scripts' decisions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from fsdpbench.reports.pages.view import Configuration
from fsdpbench.reports.pages.whole_run import Table
from fsdpbench.reports.result import RaceFinding

_MOST_FINDINGS = 50
_MOST_FRAMES = 8


@dataclass(frozen=True, slots=True)
class FindingView:
    """One finding: a title, both accesses, their stacks (a title, lines), the usual fix."""

    title: str
    table: Table
    stacks: tuple[tuple[str, str], ...]
    hint: str


@dataclass(frozen=True, slots=True)
class Races:
    """All findings of a run folder, and hints."""

    findings: tuple[FindingView, ...]
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
    return Races(tuple(_view(name, finding) for name, finding in found[:_MOST_FINDINGS]), table)


def _view(name: str, finding: RaceFinding) -> FindingView:
    kind = finding.kind[:40].replace("_", " ").capitalize()
    times = "once" if finding.count == 1 else f"{finding.count:,} times"
    title = (
        f"{kind}, {times}: {finding.second.operation[:60]} at {finding.second.line[:80]} is not ordered "
        f"after {finding.first.operation[:60]} at {finding.first.line[:80]}"
    )
    lines = tuple(
        (label, _of(finding.first), _of(finding.second))
        for label, _of in (
            ("operation", lambda a: f"{a.operation[:60]} ({a.access})"),
            ("stream", lambda a: a.stream),
            ("phase, step", lambda a: f"{a.phase}, {a.step}"),
            ("FSDP unit", lambda a: a.unit or "none"),
        )
    )
    about = (("bytes", f"{finding.bytes:,}", finding.role), ("configuration", name, ""))
    stacks = (
        _stack("First access", finding.first.stack),
        _stack("First access, its forward operator", finding.first.forward_stack),
        _stack("Second access", finding.second.stack),
        _stack("Second access, its forward operator", finding.second.forward_stack),
    )
    table = Table(("", "first access", "second access"), (*lines, *about))
    return FindingView(title, table, tuple(each for each in stacks if each[1]), finding.hint)


def _stack(title: str, frames: Sequence[str]) -> tuple[str, str]:
    return title, "\n".join(frame[:200] for frame in frames[:_MOST_FRAMES])


@dataclass(frozen=True, slots=True)
class DifferenceView:
    """The first difference of one configuration; stacks are (title, lines)."""

    title: str
    stacks: tuple[tuple[str, str], ...]


def rank_differences(rows: Sequence[Configuration]) -> tuple[DifferenceView, ...]:
    """Return the differences of all configurations whose ranks were compared."""
    found = []
    for row in rows:
        check = row.result.rank_check
        if check is None or check.difference is None:
            continue
        difference = check.difference
        sides = (
            (difference.rank, difference.call, difference.stack),
            (difference.other_rank, difference.other_call, difference.other_stack),
        )
        stacks = tuple(
            _stack(
                f"Rank {rank}{f': {call[:120]}' if call else ''}",
                [f"{each.file[:160]}:{each.line} {each.function[:60]}" for each in stack],
            )
            for rank, call, stack in sides
            if stack
        )
        found.append(DifferenceView(f"{row.name}: {difference.message[:600]}", stacks))
    return tuple(found)


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
