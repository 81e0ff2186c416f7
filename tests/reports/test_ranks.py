"""Ranks that are shared, against a search of all pairs; intervals of differences."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from fsdpbench.reports.pages.ranking import UNSHARED, Cost, cost_of, pair, shared_ranks
from fsdpbench.reports.result import Interval


def cost(speed: float, half: float = 0.01, apart: float = 0.05, **more: Any) -> Cost:
    """Return the cost of a simulated unit of work; its step takes 1 s."""
    return cost_of(speed, Interval(0.9, (1 - half, 1 + half), apart=apart, **more))


def test_rows_without_a_clear_difference_share_a_rank() -> None:
    assert shared_ranks([*map(cost, (100.0, 97.0, 94.0, 80.0)), None]) == [1, 1, 3, 4, None]


def test_measured_speeds_rank_as_they_are() -> None:
    assert shared_ranks([cost_of(speed, None) for speed in (5.0, 7.0, 7.0, 1.0)]) == [3, 1, 2, 4]
    assert shared_ranks([]) == []


@pytest.mark.parametrize("seed", range(20))
def test_against_all_pairs(seed: int) -> None:
    """Of those for which something else is unknown, as many are ahead as are clearly faster."""
    draw = random.Random(seed)
    kinds: list[dict[str, Any]] = [{}, {"half": 0.2, "because": ["a"]}, {"apart": 0.1, "because": ["b"]}]
    costs = [draw.choice((None, cost(draw.uniform(50, 100), **draw.choice(kinds)))) for _ in range(30)]
    ranks = shared_ranks(costs)
    assert [rank is None for rank in ranks] == [each is None for each in costs]
    known = [(cost, rank) for cost, rank in zip(costs, ranks, strict=True) if cost]
    before = 1
    for mine, rank in sorted(known, key=lambda each: each[0].time):
        own = [each for each in costs if each is not None and each.because == mine.because]
        others = [each for each in costs if each is not None and each.because != mine.because]
        ahead = sum(each.time < mine.time and pair(mine, each).is_clear for each in others)
        before = max(before, ahead + (shared_ranks(own)[own.index(mine)] or 0))
        assert rank == before, "and no slower one has a better rank"


def half_of(one: Cost, other: Cost) -> float:
    found = pair(one, other)
    return math.log1p(found.high) - math.log1p(found.change)


def test_settings_of_no_published_run_blur_what_only_one_does() -> None:
    """Two units of work, of which one is a tenth shorter: fp8, say."""
    known = cost(1.0, work=0.9, shared=(0.07, 0.07))
    fp8 = cost(1 / 0.9, work=0.8 / 0.9, shared=(0.07, 0.7), because=["these settings"])
    assert half_of(fp8, known) == pytest.approx(UNSHARED + 0.7 * (0.1 / 0.9))
    same = cost(1.0, work=0.9, shared=(0.07, 0.7), because=["these settings"])
    assert half_of(same, known) == pytest.approx(math.log(1.05)), "at least as any two"
    assert half_of(fp8, same) == pytest.approx(UNSHARED + 0.7 * (0.1 / 0.9)), "both have them: not known"


def test_the_link_to_the_host_is_one_for_both() -> None:
    kept = cost(1.0, work=0.9, shared=(0.07, 0.07))
    moved, less = (
        cost(1.0, work=0.9, shared=(0.07, 0.07), because=["offload"], link=link)
        for link in ((0.01, 0.3), (0.01, 0.2))
    )
    found, error = pair(moved, kept), math.log(1.05)
    assert math.log1p(found.low) == pytest.approx(-math.hypot(error, 0.3))
    assert math.log1p(found.high) == pytest.approx(math.hypot(error, 0.01))
    both = pair(moved, less)
    assert math.log1p(both.low) == pytest.approx(-math.hypot(UNSHARED, 0.1))
    assert math.log1p(both.high) == pytest.approx(UNSHARED)
