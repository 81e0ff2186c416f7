"""The rank test, the effect and the correction against what can be worked out by hand."""

from __future__ import annotations

import math

import pytest

from fsdpbench.answers.check.thresholds import effect, holm, least_p_value, p_value, runs_needed


def test_all_runs_of_one_side_below_the_other() -> None:
    """2 of the 70 ways to place four runs among eight are that extreme."""
    assert p_value([1, 2, 3, 4], [5, 6, 7, 8]) == pytest.approx(2 / 70)
    assert least_p_value(4, 4) == pytest.approx(2 / 70)


def test_equal_samples_show_nothing() -> None:
    assert p_value([1.0, 1.0], [1.0, 1.0]) == 1.0
    assert p_value([1, 2, 3], [1, 2, 3]) == pytest.approx(1.0)


def test_runs_needed_reaches_the_level_and_one_less_does_not() -> None:
    for level in (0.05, 0.01, 1e-4):
        runs = runs_needed(level)
        assert least_p_value(runs, runs) <= level < least_p_value(runs - 1, runs - 1)


def test_one_wild_run_does_not_move_the_effect() -> None:
    before = [1.0, 1.01, 0.99, 1.0, 1.0]
    assert effect(before, [1.1, 1.11, 1.09, 1.1, 50.0]) == pytest.approx(0.1, abs=0.011)


def test_effects_from_nothing() -> None:
    assert effect([0.0, 0.0], [0.0, 0.0]) == 0.0
    assert effect([0.0, 0.0], [0.1, 0.2]) == math.inf


def test_holm() -> None:
    """Worked: sorted 0.01 x 4, 0.02 x 3, 0.03 x 2, 0.04 x 1, and never falling."""
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []
