"""Library tables from measured operators: what a fit says of sizes that it has not seen."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from fsdpbench.sim.model.chips import OPERATOR_CHIPS
from fsdpbench.sim.model.network import curve_seconds
from fsdpbench.sim.model.sections import LibraryTables

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "ci"))
from profile_tables.collectives import fit_collectives
from profile_tables.grid_fit import Prior, Task, fit_factors
from profile_tables.measured import COLLECTIVE, Measured, read_folder

DIP = 1 << 24


def _curve(op: str, slow: float, without: int) -> list[Measured]:
    """A link that takes `slow` times as long from `DIP` to twice of it."""
    rows = []
    for power in range(9, 30):
        size = 1 << power
        us = (8.0 + size / 600e3) * (slow if DIP <= size <= 2 * DIP else 1.0)
        if size != without:
            columns = {"gpu": "b200", "nccl": "2.29", "op": op, "gpus": 8, "bytes": size, "us": us}
            rows.append(Measured(COLLECTIVE, columns))
    return rows


def test_a_missing_size_follows_the_curve_of_its_pair() -> None:
    rows = _curve("all_gather", 1.6, DIP) + _curve("reduce_scatter", 1.6, 0)
    tables = LibraryTables("1", "a test", collectives=fit_collectives(rows, OPERATOR_CHIPS)["b200"])
    wanted = (8.0 + DIP / 600e3) * 1.6
    found = curve_seconds(tables, "all_gather", DIP, 8)
    assert found is not None
    assert found * 1e6 == pytest.approx(wanted, rel=0.12)
    alone = fit_collectives(_curve("all_gather", 1.6, DIP), OPERATOR_CHIPS)["b200"]
    missed = curve_seconds(LibraryTables("1", "a test", collectives=alone), "all_gather", DIP, 8)
    assert missed is not None
    assert abs(missed * 1e6 - wanted) > abs(found * 1e6 - wanted)


def test_times_rise_with_the_bytes_whatever_was_measured() -> None:
    rows = _curve("all_gather", 0.2, 0)
    (curve,) = fit_collectives(rows, OPERATOR_CHIPS)["b200"]["all_gather"]
    times = [us for _, us in curve.points]
    assert times == sorted(times)


def test_factors_of_a_relative_serve_where_a_chip_was_not_measured() -> None:
    axes = ((1.0, 16.0, 256.0),)
    places = np.array([1.0, 16.0, 256.0, 1.0])
    left = np.array([0.0, 0.2, 0.4, 0.0])
    known, poor = Task("b200", "blackwell", "x"), Task("b300", "blackwell", "x")
    prior = Prior(0.003, 0.01, 0.0, 0.0, 0.0001, (1.0,))
    found = fit_factors(axes, (places,), left, [known, known, known, poor], prior)
    assert found[known] == pytest.approx([0.0, 0.2, 0.4], abs=0.02)
    assert 0.2 < found[poor][2] < found[known][2]


@pytest.mark.campaign
def test_profiles_meet_their_bars() -> None:
    whole = os.environ.get("FSDPBENCH_SHARED")
    assert whole, "set FSDPBENCH_SHARED: 5 rows a chip, as in the sample, say nothing of a mean"
    folder = Path(whole) / "data" / "measured"
    from operator_prices import bars_of, compare

    assert len(read_folder(folder)) > 5000
    assert [bar.name for bar in bars_of(compare(folder)) if not bar.met] == []
