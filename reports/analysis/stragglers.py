"""Waiting for slow ranks apart from transfer, from the traces of several ranks.

A collective runs on every rank until the last rank has joined and the data are there.  Whoever comes last
waits for nobody, so its duration is the transfer alone; the others' excess over it is waiting:

    rank 0   |== waiting ===|= transfer =|
    rank 1          |= w ===|= transfer =|
    rank 2                  |= transfer =|   <- the straggler

Only durations are compared, so the ranks' clocks need not agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from reports.analysis.activity import Activity
from reports.trace.model import Int8, Int64

NAMED_FROM = 0.6
"""Share of all waiting that a rank must cause to be named the straggler."""
WORTH_NAMING = 0.01
"""Share of the time that the ranks must wait on average for a straggler to be worth a name."""


@dataclass(frozen=True, eq=False)
class CollectiveDurations:
    """One rank's collectives in order of their launch: type (as in `COLLECTIVE_TYPES`), full buffer's bytes
    (-1 unknown), duration in ns."""

    kind: Int8
    message: Int64
    duration: Int64

    def __len__(self) -> int:
        return len(self.kind)


@dataclass(frozen=True)
class Waiting:
    """Who waited for whom.

    waited: ns by rank, over all collectives that could be matched (`matched`).  caused: by rank, the share of
    all waiting that happened while this rank was the last.  straggler: the rank that causes most of it.
    """

    matched: int
    waited: dict[int, int]
    caused: dict[int, float]
    straggler: int | None


def collective_durations(activity: Activity) -> CollectiveDurations:
    """The durations of a trace's collectives, in the order in which the CPU asked for them."""
    collectives = activity.collectives
    order = np.argsort(collectives.work.asked(), kind="stable")
    duration = (collectives.work.end - collectives.work.start)[order]
    return CollectiveDurations(collectives.kind[order], collectives.message[order], duration)


def find_waiting(ranks: Mapping[int, CollectiveDurations], time: int) -> Waiting | None:
    """Waiting by rank, or None where the ranks' collectives do not match (other numbers or types of them).

    Args:
        ranks: by rank; every collective is taken to be one of all these ranks.
        time: ns, the mean length of the ranks' traced steps together.
    """
    if len(ranks) < 2:
        return None
    numbers = list(ranks)
    first = ranks[numbers[0]]
    if not len(first) or not _alike(list(ranks.values())):
        return None
    durations = np.stack([ranks[number].duration for number in numbers])
    last = np.argmin(durations, axis=0)
    waits = durations - durations.min(axis=0)
    waited = {number: int(wait) for number, wait in zip(numbers, waits.sum(axis=1), strict=True)}
    everything = int(waits.sum())
    by_last = np.bincount(last, weights=waits.sum(axis=0), minlength=len(numbers))
    caused = {
        number: float(each) / everything if everything else 0.0
        for number, each in zip(numbers, by_last, strict=True)
    }
    worst = max(numbers, key=lambda number: caused[number])
    named = caused[worst] >= NAMED_FROM and everything >= WORTH_NAMING * time * (len(numbers) - 1)
    return Waiting(len(first), waited, caused, worst if named else None)


def _alike(ranks: Sequence[CollectiveDurations]) -> bool:
    first = ranks[0]
    return all(
        len(rank) == len(first)
        and bool((rank.kind == first.kind).all())
        and bool((rank.message == first.message).all())
        for rank in ranks[1:]
    )
