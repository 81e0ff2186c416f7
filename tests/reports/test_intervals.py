"""Interval algebra against counting every nanosecond."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fsdpbench.reports.analysis import intervals
from fsdpbench.reports.analysis.intervals import Intervals

SPAN = 60
pairs = st.lists(st.tuples(st.integers(0, SPAN), st.integers(0, SPAN)), max_size=12)


def make(values: list[tuple[int, int]]) -> Intervals:
    array = np.array(values, np.int64).reshape(-1, 2)
    return intervals.of(array[:, 0], array[:, 1])


def points(values: list[tuple[int, int]]) -> set[int]:
    return {point for start, end in values for point in range(start, end)}


def covered_points(found: Intervals) -> set[int]:
    return points(list(zip(found.start.tolist(), found.end.tolist(), strict=True)))


def is_normal(found: Intervals) -> bool:
    return bool((found.end > found.start).all() and (found.start[1:] > found.end[:-1]).all())


@given(pairs)
def test_union_of_any_pairs(values: list[tuple[int, int]]) -> None:
    found = make(values)
    assert covered_points(found) == points(values)
    assert found.length() == len(points(values))
    assert is_normal(found)


@given(pairs, pairs)
def test_operations_equal_those_on_points(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    one, other = make(a), make(b)
    for found, expected in (
        (intervals.union(one, other), points(a) | points(b)),
        (intervals.intersect(one, other), points(a) & points(b)),
        (intervals.subtract(one, other), points(a) - points(b)),
    ):
        assert covered_points(found) == expected
        assert is_normal(found)


@given(pairs, st.integers(-5, SPAN + 5), st.integers(-5, SPAN + 5))
def test_clip(a: list[tuple[int, int]], start: int, end: int) -> None:
    assert covered_points(intervals.clip(make(a), start, end)) == points(a) & set(range(start, end))


@given(pairs, pairs)
def test_covered_counts_for_each_interval(a: list[tuple[int, int]], asked: list[tuple[int, int]]) -> None:
    array = np.array(asked, np.int64).reshape(-1, 2)
    found = intervals.covered(make(a), array[:, 0], array[:, 1])
    assert found.tolist() == [len(points(a) & set(range(start, end))) for start, end in asked]


def test_large_times_stay_exact() -> None:
    start = 1_712_195_495_519_689_047
    found = intervals.of(np.array([start, start + 10]), np.array([start + 3, start + 11]))
    assert found.length() == 4
    assert intervals.subtract(intervals.single(start, start + 20), found).length() == 16
