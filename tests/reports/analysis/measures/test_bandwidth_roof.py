"""Achieved bus bandwidth against the roof of the links, or against the best one seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdpbench.reports.analysis import analyze
from fsdpbench.reports.analysis.activity import group_ranks
from fsdpbench.reports.analysis.peaks import Links
from fsdpbench.reports.analysis.text import describe
from fsdpbench.reports.readers import CollectiveInfo

LINKS = Links("test-gpu", gpus_per_node=8, inside_node=240e9, between_nodes=200e9)


@pytest.mark.parametrize(
    ("ranks", "roof"),
    [
        (tuple(range(8)), 240e9),
        ((0, 4), 240e9),
        (tuple(range(16)), 200e9),
        ((0, 8), 25e9),  # One rail of eight.
        ((0, 1, 8, 9), 50e9),
        ((3,), None),
    ],
)
def test_the_roof_of_a_group(ranks: tuple[int, ...], roof: float | None) -> None:
    assert LINKS.roof(ranks, len(ranks)) == roof


def test_ranks_that_are_not_told_lie_side_by_side() -> None:
    assert LINKS.roof(None, 8) == 240e9
    assert LINKS.roof(None, 16) == 200e9
    assert LINKS.roof(None, None) is None


@pytest.mark.parametrize(
    ("text", "size", "ranks"),
    [
        ("[0, 1, 2, 3]", 4, (0, 1, 2, 3)),
        ("[0, 8, 16, ..., 504]", 64, tuple(range(0, 512, 8))),
        ("[0, 1, 2, ..., 504]", 64, None),
        ("[0, 8, 3, ..., 504]", 64, None),
        ("", 4, None),
        (None, 4, None),
        ("[a, ..., b]", 4, None),
    ],
)
def test_ranks_from_the_metadata(text: str | None, size: int, ranks: tuple[int, ...] | None) -> None:
    assert group_ranks(CollectiveInfo("allreduce", 1, 1, "Float", size, "0", text)) == ranks


def job(built: Any) -> Any:
    """Two all-gathers of 16 MB over 8 ranks, 14 MB on the wire each: in 100 us and in 200 us."""
    built.step(0, 1_000_000, 2_000_000)
    built.collective("all_gather", 1_010_000, 1_110_000, elements=8_000_000)
    built.collective("all_gather", 1_200_000, 1_400_000, elements=8_000_000)
    return built


def test_against_the_roof_of_the_profile(tmp_path: Path, trace_builder: Any) -> None:
    built = job(trace_builder(deviceProperties=[{"id": 0, "name": "Test GPU"}]))
    path = built.write(tmp_path / "rank0_trace.json")
    analysis = analyze([path], links={"Test GPU": LINKS})
    figures = analysis.ranks[0].communication["all_gather"]
    assert figures.bus_bandwidth == pytest.approx(28e6 / 300e-6)
    assert figures.roof_bandwidth == pytest.approx(240e9, rel=1e-3)
    assert figures.roof_share == pytest.approx(28e6 / 300e-6 / 240e9, rel=1e-3)
    assert "39 % of test-gpu's 240" in describe(analysis)
    assert analysis.ranks[0].to_dict()["bandwidth_roof"] == "test-gpu"


def test_without_a_profile_the_best_one_counts_and_it_is_said(tmp_path: Path, trace_builder: Any) -> None:
    analysis = analyze([job(trace_builder()).write(tmp_path / "rank0_trace.json")])
    figures = analysis.ranks[0].communication["all_gather"]
    assert figures.roof_bandwidth is None
    assert figures.roof_share == pytest.approx(2 / 3)
    assert "67 % of it (the peak of this hardware is not known)" in describe(analysis)
    assert analysis.ranks[0].to_dict()["bandwidth_roof"] is None


def test_a_simulated_trace_names_its_own_links(tmp_path: Path, trace_builder: Any) -> None:
    label = {
        "gpus_per_node": 4,
        "inside_node_bytes_per_s": 240e9,
        "between_nodes_bytes_per_s": 100e9,
    }
    built = job(trace_builder(fsdpbench={"device": "sim", "hardware": {"name": "a100", "links": label}}))
    rank = analyze([built.write(tmp_path / "rank0_trace.json")]).ranks[0]
    assert rank.communication["all_gather"].roof_bandwidth == pytest.approx(100e9, rel=1e-3)
