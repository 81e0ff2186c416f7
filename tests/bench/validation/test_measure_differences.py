"""The width of differences: fitted to published pairs, and it holds on sources that were held out."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fsdpbench.engine.results.residuals.widths import read_table
from fsdpbench.reports.pages.ranking import UNSHARED

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "ci"))
from measure_differences import Pair, fit, held_out, pairs_of


def test_the_constant_is_the_fitted_one_and_covers_nine_in_ten_pairs_of_new_sources() -> None:
    pairs = pairs_of(read_table())
    assert fit(pairs) == pytest.approx(UNSHARED, abs=5e-4)
    inside = [each for _, _, own, _ in held_out(pairs) for each in own]
    assert len(inside) > 200
    assert 0.85 <= sum(inside) / len(inside) <= 0.95
    alone = sum(pair.gap <= pair.width for pair in pairs) / len(pairs)
    assert alone < 0.85, "what is not shared counts"


def test_sources_count_alike() -> None:
    """Nine in ten of a large source's pairs do not decide."""
    large = [Pair("large", 0.0, 0.01)] * 90 + [Pair("large", 0.0, 0.05)] * 10
    small = [Pair("small", 0.02, 0.06)] * 3
    assert fit([*large, *small]) == fit([*large, *small * 3]) > 0.04
