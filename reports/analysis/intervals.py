"""Algebra of half-open time intervals [start, end) on int64 nanoseconds, vectorised.

A set of intervals is an `Intervals`: two int64 arrays, sorted, disjoint, not touching, none empty.  Every
operation takes and returns such sets, so lengths add up exactly and nothing is counted twice.

    a          ####      ######
    b             ####     ##
    union      #######   ######
    intersect     #        ##
    subtract   ###       ##  ##
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Intervals:
    """A normal set: `start` and `end` are int64 ns arrays of equal length with start < end < next start."""

    start: Int64
    end: Int64

    def __len__(self) -> int:
        return len(self.start)

    def length(self) -> int:
        """Return the time covered, ns."""
        return int((self.end - self.start).sum())


EMPTY = Intervals(np.empty(0, np.int64), np.empty(0, np.int64))


def of(start: Int64, end: Int64) -> Intervals:
    """Return the union of any intervals, given in any order; empty and inverted ones are left out."""
    keep = end > start
    if not keep.all():
        start, end = start[keep], end[keep]
    if len(start) == 0:
        return EMPTY
    if len(start) > 1 and not (start[1:] >= start[:-1]).all():
        order = np.argsort(start, kind="stable")
        start, end = start[order], end[order]
    reach = np.maximum.accumulate(end)
    # A new interval begins where the next start lies beyond everything before it.
    first = np.empty(len(start), np.bool_)
    first[0] = True
    np.greater(start[1:], reach[:-1], out=first[1:])
    last = np.flatnonzero(first)
    return Intervals(start[last], reach[np.append(last[1:] - 1, len(start) - 1)])


def single(start: int, end: int) -> Intervals:
    """Return one interval; empty when end <= start."""
    if end <= start:
        return EMPTY
    return Intervals(np.array([start], np.int64), np.array([end], np.int64))


def union(a: Intervals, b: Intervals) -> Intervals:
    """Return the times in `a` or in `b`."""
    if len(a) == 0:
        return b
    if len(b) == 0:
        return a
    return of(np.concatenate([a.start, b.start]), np.concatenate([a.end, b.end]))


def intersect(a: Intervals, b: Intervals) -> Intervals:
    """Return the times in both `a` and `b`."""
    if len(a) == 0 or len(b) == 0:
        return EMPTY
    # Every interval of `a` meets a run of neighbours in `b`: from the first that ends after its start to
    # the last that starts before its end.
    low = np.searchsorted(b.end, a.start, side="right")
    high = np.searchsorted(b.start, a.end, side="left")
    count = np.maximum(high - low, 0)
    of_a = np.repeat(np.arange(len(a)), count)
    offset = np.arange(len(of_a)) - np.repeat(np.cumsum(count) - count, count)
    of_b = low[of_a] + offset
    return Intervals(np.maximum(a.start[of_a], b.start[of_b]), np.minimum(a.end[of_a], b.end[of_b]))


def subtract(a: Intervals, b: Intervals) -> Intervals:
    """Return the times in `a` and not in `b`."""
    if len(a) == 0 or len(b) == 0:
        return a
    # The gaps of `b`, widened to cover `a`, are everything outside `b`.
    low = min(int(a.start[0]), int(b.start[0])) - 1
    high = max(int(a.end[-1]), int(b.end[-1])) + 1
    gaps = Intervals(np.concatenate([[low], b.end]), np.concatenate([b.start, [high]]))
    return intersect(a, gaps)


def clip(a: Intervals, start: int, end: int) -> Intervals:
    """Return the times in `a` within [start, end)."""
    if len(a) == 0 or end <= start:
        return EMPTY
    low = int(np.searchsorted(a.end, start, side="right"))
    high = int(np.searchsorted(a.start, end, side="left"))
    if high <= low:
        return EMPTY
    return Intervals(np.maximum(a.start[low:high], start), np.minimum(a.end[low:high], end))


def covered(a: Intervals, start: Int64, end: Int64) -> Int64:
    """Return how many ns of each [start, end) are in `a`; the given intervals may overlap one another."""
    if len(a) == 0 or len(start) == 0:
        return np.zeros(len(start), np.int64)
    before = np.concatenate([[0], np.cumsum(a.end - a.start)])

    def up_to(points: Int64) -> Int64:
        begun = np.searchsorted(a.start, points, side="right")
        whole = before[begun]
        over = np.where(begun > 0, np.maximum(a.end[np.maximum(begun, 1) - 1] - points, 0), 0)
        result: Int64 = whole - over
        return result

    return up_to(np.maximum(end, start)) - up_to(start)
