"""Which bytes of its storage a tensor touches, exactly.

Most tensors touch one interval. Others have holes (columns of a matrix): two of them overlap in their extents
and need not share an element::

    a = buffer[:, 0:2]      | x x . . | x x . . | x x . . |
    b = buffer[:, 2:4]      | . . x x | . . x x | . . x x |     no byte in common
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fsdpbench.sim.torch_device.followed import Region, Runs

_MOST_RUNS = 1 << 20
"""Of a tensor with more holes only the residues by its strides are compared."""


def region_of(shape: Sequence[int], strides: Sequence[int], offset: int, itemsize: int) -> Region | None:
    """The bytes of a tensor; offset and strides in elements. None for a tensor without elements."""
    if 0 in shape:
        return None
    start = offset * itemsize
    dimensions = sorted(
        (stride * itemsize, size)
        for size, stride in zip(shape, strides, strict=True)
        if size > 1 and stride > 0
    )
    width = itemsize
    outer: list[tuple[int, int]] = []
    for step, count in dimensions:
        if not outer and step <= width:
            width = step * (count - 1) + width
        elif outer and step == outer[-1][0] * outer[-1][1]:
            outer[-1] = (outer[-1][0] * 1, outer[-1][1] * count)
        else:
            outer.append((step, count))
    if not outer:
        return Region(start, start + width)
    end = start + width + sum(step * (count - 1) for step, count in outer)
    return Region(start, end, Runs(tuple((count, step) for step, count in reversed(outer)), width))


def overlap(first: Region, second: Region) -> int:
    """How many bytes two regions of one storage share (those of one with very many holes: an estimate)."""
    low, high = max(first.start, second.start), min(first.end, second.end)
    if low >= high:
        return 0
    if first.runs is None and second.runs is None:
        return high - low
    few = [_count(region) <= _MOST_RUNS for region in (first, second)]
    if not all(few):
        return 0 if _apart_by_residue(first, second) else high - low
    starts, ends = _runs_between(first, low, high)
    others, other_ends = _runs_between(second, low, high)
    if not len(starts) or not len(others):
        return 0
    if len(starts) > len(others):
        starts, ends, others, other_ends = others, other_ends, starts, ends
    return _shared(starts, ends, others, other_ends)


def _shared(starts: np.ndarray, ends: np.ndarray, others: np.ndarray, other_ends: np.ndarray) -> int:
    """Bytes in both of two sorted, disjoint lists of intervals."""
    # Bytes of the second list below a point: whole runs before it, and a part of the one it lies in.
    totals = np.concatenate(([0], np.cumsum(other_ends - others)))

    def below(points: np.ndarray) -> np.ndarray:
        index = np.searchsorted(others, points, side="right")
        inside = np.minimum(points, other_ends[np.maximum(index - 1, 0)]) - others[np.maximum(index - 1, 0)]
        found: np.ndarray = np.where(index > 0, totals[np.maximum(index - 1, 0)] + inside, 0)
        return found

    return int((below(ends) - below(starts)).sum())


def _count(region: Region) -> int:
    return math.prod(count for count, _ in region.runs.dimensions) if region.runs else 1


def _runs_between(region: Region, low: int, high: int) -> tuple[np.ndarray, np.ndarray]:
    """Sorted starts and ends of the runs, cut to what is between."""
    if region.runs is None:
        return np.array([low]), np.array([high])
    starts = np.array([region.start], dtype=np.int64)
    for count, step in region.runs.dimensions:
        starts = (starts[:, None] + np.arange(count, dtype=np.int64)[None, :] * step).reshape(-1)
    starts.sort()
    ends = starts + region.runs.width
    # Runs that overlap each other (unfolded windows) count once.
    ends[:-1] = np.minimum(ends[:-1], starts[1:])
    inside = (ends > low) & (starts < high)
    return np.maximum(starts[inside], low), np.minimum(ends[inside], high)


def _apart_by_residue(first: Region, second: Region) -> bool:
    """Whether two regions are in different columns of a common step."""
    steps = [step for region in (first, second) if region.runs for _, step in region.runs.dimensions]
    step = math.gcd(*steps)
    widths = [region.runs.width if region.runs else region.end - region.start for region in (first, second)]
    if max(widths) >= step:
        return False
    shift = (second.start - first.start) % step
    return shift >= widths[0] and shift + widths[1] <= step
