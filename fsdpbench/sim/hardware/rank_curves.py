"""Collectives inside a node by a library's curves, one for each measured number of ranks.

Along a curve time is linear in the logarithms of bytes and microseconds; below its first point the latency
stays, beyond its last the time grows with the bytes. Between measured numbers of ranks the logarithm of the
time is linear in that of the ranks, but where the switch reduces only from so many ranks on
(``switch_from``): there a number takes the curve of its own side, for the bytes that its ranks send.
"""

from __future__ import annotations

import bisect
import math

from fsdpbench.sim.hardware.library_sections import LibraryTables, RankCurve

# A collective without a curve of its own takes that of the one that sends as much.
_LIKE = {"broadcast": "all_gather", "barrier": "all_reduce"}


def curve_seconds(tables: LibraryTables, kind: str, nbytes: int, size: int) -> float | None:
    """Seconds among ``size`` ranks of one node; None if the library has no curve for ``kind``."""
    curves = tables.collectives.get(_LIKE.get(kind, kind))
    if not curves:
        return None
    ranks = [curve.ranks for curve in curves]
    above = bisect.bisect_left(ranks, size)
    if above < len(curves) and ranks[above] == size:
        return time_on(curves[above], nbytes)
    if above in (0, len(curves)):
        return _scaled(curves[min(above, len(curves) - 1)], nbytes, size)
    low, high = curves[above - 1], curves[above]
    if low.ranks < tables.switch_from <= high.ranks:
        return _scaled(high if size >= tables.switch_from else low, nbytes, size)
    share = math.log(size / low.ranks) / math.log(high.ranks / low.ranks)
    return math.exp((1 - share) * math.log(time_on(low, nbytes)) + share * math.log(time_on(high, nbytes)))


def _scaled(curve: RankCurve, nbytes: int, size: int) -> float:
    """A curve for another number of ranks: the time at which its ranks would send as many bytes."""
    sent = (size - 1) / size / ((curve.ranks - 1) / curve.ranks)
    return time_on(curve, nbytes * sent)


def time_on(curve: RankCurve, nbytes: float) -> float:
    """Seconds of a full buffer of ``nbytes`` among the curve's own number of ranks."""
    points = curve.points
    index = bisect.bisect_left(points, (nbytes,))
    if index == 0:
        return points[0][1] * 1e-6
    if index == len(points):
        size, us = points[-1]
        return us * nbytes / size * 1e-6
    (low, fast), (high, slow) = points[index - 1], points[index]
    share = math.log(nbytes / low) / math.log(high / low)
    return float(fast * (slow / fast) ** share * 1e-6)
