"""The ranks of one configuration side by side, and the rank that the others wait for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fsdpbench.reports.analysis import RankAnalysis, RanksSummary, analyze_trace
from fsdpbench.reports.analysis.ranks import summarize
from fsdpbench.reports.page import display
from fsdpbench.reports.page.charts.whole_run import Table
from fsdpbench.reports.trace import TraceError, read_trace

# Reading more of them for every configuration would take the page too long; `analyze` reads all.
_MOST_RANKS = 16


@dataclass(frozen=True, slots=True)
class RanksTable:
    """A sentence and the table, a row a rank."""

    lead: str
    table: Table


def ranks_table(first: RankAnalysis, others: Sequence[Path]) -> RanksTable | None:
    """Rank `first` (analysed already) beside the ranks of the other traces; None where there are none."""
    ranks = [first]
    unread = 0
    for path in others[: _MOST_RANKS - 1]:
        try:
            ranks.append(analyze_trace(read_trace(path)))
        except TraceError:
            unread += 1
    if len(ranks) < 2:
        return None
    summary = summarize(ranks, unread)
    left_out = len(others) + 1 - len(ranks) - unread
    return RanksTable(
        _lead(summary, unread, left_out), Table(_COLUMNS, tuple(_row(rank, summary) for rank in ranks))
    )


_COLUMNS = (
    *("rank", "step, ms", "compute only, ms", "overlapped, ms", "exposed, ms", "idle, ms", "overlap"),
    *("waits for ranks, ms", "of all waiting caused"),
)


def _row(rank: RankAnalysis, summary: RanksSummary) -> tuple[str, ...]:
    step = rank.mean_step
    amounts = (step.total, step.compute_only, step.overlapped, step.exposed_communication, step.idle)
    waiting = summary.waiting
    waited = waiting.waited.get(rank.rank) if waiting else None
    return (
        str(rank.rank),
        *(display.ms(amount / 1e6) for amount in amounts),
        display.percent(rank.overlap_fraction),
        display.NOTHING if waited is None else display.ms(waited / max(1, len(rank.steps)) / 1e6),
        display.percent(waiting.caused.get(rank.rank) if waiting else None, 0),
    )


def _lead(summary: RanksSummary, unread: int, left_out: int) -> str:
    told = []
    if summary.waiting is None:
        told.append("The ranks' collectives do not match, so which rank waits for which is unknown.")
    elif summary.waiting.straggler is None:
        told.append("No rank makes the others wait much more than another does.")
    else:
        share = display.percent(summary.waiting.caused[summary.waiting.straggler], 0)
        told.append(f"Rank {summary.waiting.straggler} causes {share} of all waiting for ranks.")
    if summary.waiting is not None and len(summary.waiting.groups) > 1:
        told.append(f"They wait in {len(summary.waiting.groups)} communicators.")
    if unread:
        told.append(f"{unread} traces could not be read.")
    if left_out:
        told.append(f"{left_out} more ranks are left to fsdpbench analyze.")
    return " ".join(told)
