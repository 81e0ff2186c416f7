"""Figures across the ranks of one configuration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from fsdpbench.reports.analysis.device.time_units import seconds
from fsdpbench.reports.analysis.measures.stragglers import Waiting, find_waiting
from fsdpbench.reports.analysis.model import RankAnalysis, RanksSummary, Spread


def summarize(ranks: Sequence[RankAnalysis], unread: int = 0) -> RanksSummary:
    """Mean, least and greatest of each figure; the slowest rank is that of the longest mean step. `unread`:
    how many traces of the same ranks could not be read.

    Ranks of one job wait for one another in collectives, so their steps take about equally long; the rank
    that makes the others wait is `waiting.straggler`.
    """
    numbers = tuple(rank.rank for rank in ranks)
    world_size = max((rank.world_size or 0 for rank in ranks), default=0) or None
    missing = max((world_size or 0) - len(set(numbers)), 0)
    simulated = any(rank.simulated for rank in ranks)
    warnings: list[str] = []
    if missing and not simulated:
        warnings.append(
            f"{len(set(numbers))} of {world_size} ranks have a trace: a straggler may not be among them"
        )
    doubts = _doubts(ranks, unread)
    figures: dict[str, Callable[[RankAnalysis], float | None]] = {
        "step_time_s": lambda rank: seconds(rank.mean_step.total),
        "compute_only_s": lambda rank: seconds(rank.mean_step.compute_only),
        "overlapped_s": lambda rank: seconds(rank.mean_step.overlapped),
        "exposed_communication_s": lambda rank: seconds(rank.mean_step.exposed_communication),
        "idle_s": lambda rank: seconds(rank.mean_step.idle),
        "overlap_fraction": lambda rank: rank.overlap_fraction,
    }
    spreads = {name: spread for name, of in figures.items() if (spread := _spread(ranks, of)) is not None}
    return RanksSummary(
        ranks=numbers,
        world_size=world_size,
        missing_ranks=missing,
        slowest_rank=max(ranks, key=lambda rank: rank.mean_step.total).rank if ranks else None,
        figures=spreads,
        trusted=not doubts,
        warnings=(*doubts, *warnings),
        waiting=_waiting(ranks),
    )


def _doubts(ranks: Sequence[RankAnalysis], unread: int) -> list[str]:
    """Why figures across these ranks cannot be believed."""
    doubts = [f"{unread} traces could not be read"] if unread else []
    numbers = [rank.rank for rank in ranks]
    twice = sorted(number for number, count in Counter(numbers).items() if count > 1)
    if twice:
        told = ", ".join(map(str, twice[:10]))
        doubts.append(f"some ranks have more than one trace: {told}{' and more' if len(twice) > 10 else ''}")
    sizes = sorted({rank.world_size for rank in ranks if rank.world_size is not None})
    if len(sizes) > 1:
        told = ", ".join(map(str, sizes[:10]))
        doubts.append(f"the traces are of different jobs: their world sizes are {told}")
    untrusted = sum(not rank.trusted for rank in ranks)
    if untrusted:
        doubts.append(f"{untrusted} of {len(ranks)} traces are not trusted")
    return doubts


def _waiting(ranks: Sequence[RankAnalysis]) -> Waiting | None:
    by_rank = {rank.rank: rank.durations for rank in ranks if rank.durations is not None}
    if len(by_rank) < len(ranks):
        return None
    return find_waiting(by_rank, sum(rank.time.total for rank in ranks) // len(ranks))


def _spread(ranks: Sequence[RankAnalysis], of: Callable[[RankAnalysis], float | None]) -> Spread | None:
    values = [(value, rank.rank) for rank in ranks if (value := of(rank)) is not None]
    if not values:
        return None
    greatest, at = max(values, key=lambda pair: pair[0])
    return Spread(sum(value for value, _ in values) / len(values), min(values)[0], greatest, at)
