"""Decisions of scripts by values that simulated tensors do not have."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import PurePath

from fsdpbench.reports.pages.view import Configuration
from fsdpbench.reports.pages.whole_run import Table

_MOST_ROWS = 200


def decisions_table(rows: Sequence[Configuration]) -> Table | None:
    """Return the decisions of all configurations, most frequent first; None where nothing was decided."""
    found = [(row.name, decision) for row in rows for decision in row.result.placeholder_decisions or ()]
    if not found:
        return None
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
    return Table(("line of the script", "question", "answer", "times", "configuration"), tuple(lines))
