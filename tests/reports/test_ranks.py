"""Ranks that are shared: against a search of all pairs."""

from __future__ import annotations

import random

import pytest

from fsdpbench.reports.pages.ranking import shared_ranks


def test_rows_without_a_clear_difference_share_a_rank() -> None:
    assert shared_ranks([100.0, 97.0, 94.0, 80.0, None], [0.05] * 5) == [1, 1, 2, 4, None]


def test_measured_speeds_rank_as_they_are() -> None:
    assert shared_ranks([5.0, 7.0, 7.0, 1.0], [0.0] * 4) == [3, 1, 2, 4]
    assert shared_ranks([], []) == []


@pytest.mark.parametrize("seed", range(20))
def test_against_all_pairs(seed: int) -> None:
    draw = random.Random(seed)
    speeds = [draw.choice((None, draw.uniform(50, 100))) for _ in range(30)]
    errors = [draw.choice((0.0, 0.05, 0.2)) for _ in speeds]

    def ahead(mine: int) -> int:
        own = speeds[mine] or 0.0
        return sum(
            other > own * (1 + max(errors[mine], errors[place]))
            for place, other in enumerate(speeds)
            if other is not None
        )

    wanted = [None if speed is None else 1 + ahead(place) for place, speed in enumerate(speeds)]
    assert shared_ranks(speeds, errors) == wanted
