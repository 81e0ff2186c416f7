"""Differences between ranks' collectives for the page: a sentence and both stacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdpbench.reports.pages.view import Configuration
from fsdpbench.reports.result import RankFrame

_MOST_FRAMES = 8


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
        told = check.difference
        sides = ((told.rank, told.call, told.stack), (told.other_rank, told.other_call, told.other_stack))
        stacks = tuple(
            (f"Rank {rank}{f': {call[:120]}' if call else ''}", _lines(stack))
            for rank, call, stack in sides
            if stack
        )
        found.append(DifferenceView(f"{row.name}: {told.message[:600]}", stacks))
    return tuple(found)


def _lines(stack: Sequence[RankFrame]) -> str:
    return "\n".join(f"{each.file[:160]}:{each.line} {each.function[:60]}" for each in stack[:_MOST_FRAMES])
