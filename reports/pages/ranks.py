"""Ranks that configurations share where they cannot be distinguished."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Sequence


def shared_ranks(speeds: Sequence[float | None], apart: Sequence[float]) -> list[int | None]:
    """Return the rank of each of `speeds`: 1 and as many as are surely faster; None without a speed.

    `apart`: the share by which two speeds must differ to be distinguished, the larger one of the two; where
    it is 0 (measured), equal speeds rank in their order.
    """
    by_error: dict[float, list[float]] = defaultdict(list)
    for speed, error in zip(speeds, apart, strict=True):
        if speed:
            by_error[error].append(speed)
    for found in by_error.values():
        found.sort()
    seen: dict[float, int] = defaultdict(int)
    ranks: list[int | None] = []
    for speed, error in zip(speeds, apart, strict=True):
        if not speed:
            ranks.append(None)
            continue
        ahead = sum(
            len(found) - bisect.bisect_right(found, speed * (1 + max(error, other)))
            for other, found in by_error.items()
        )
        if not error:
            ahead += seen[speed]
            seen[speed] += 1
        ranks.append(1 + ahead)
    return ranks
