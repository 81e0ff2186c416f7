"""Packing a step for the canvas: nothing is lost, labels say what runs, sizes stay bounded."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import pytest

from fsdpbench.reports.analysis import RankAnalysis, analyze_trace
from fsdpbench.reports.pages.timeline import KINDS, pack_timeline, stream_rows
from fsdpbench.reports.readers import Trace, read_trace


@pytest.fixture(scope="module")
def traced(sweep: Path) -> tuple[Trace, RankAnalysis]:
    (path,) = sweep.glob("impl-fsdp1-block-pre-bf16-2-*/trace/rank0_trace.json.gz")
    trace = read_trace(path)
    return trace, analyze_trace(trace)


def test_every_bar_comes_back_from_the_packed_columns(traced: tuple[Trace, RankAnalysis]) -> None:
    trace, analysis = traced
    step = analysis.steps[-1]
    packed = pack_timeline(trace, step, 6000)
    assert packed is not None
    for row, original in zip(packed["rows"], stream_rows(trace, step, max_bars=2000), strict=True):
        starts = list(accumulate(row["s"]))
        found = {
            (start, length, packed["names"][name], packed["units"][unit] if unit >= 0 else None)
            for start, length, name, unit in zip(starts, row["d"], row["n"], row["u"], strict=True)
        }
        assert found == {(bar.start, bar.duration, bar.name, bar.unit) for bar in original.bars}
        assert starts == sorted(starts)
        assert int(max(row["l"])) + 1 == row["lanes"]


def test_streams_are_named_after_their_work_and_kernels_carry_units(
    traced: tuple[Trace, RankAnalysis],
) -> None:
    trace, analysis = traced
    packed = pack_timeline(trace, analysis.steps[-1], 6000)
    assert packed is not None
    labels = [row["label"] for row in packed["rows"]]
    assert {"compute · stream 7", "all-gather · stream 20", "reduce-scatter · stream 24"} <= set(labels)
    gathers = packed["rows"][labels.index("all-gather · stream 20")]
    assert {KINDS[int(kind)] for kind in gathers["c"]} == {"all_gather"}
    assert [packed["units"][unit] for unit in gathers["u"]][:3] == ["blocks.0", "blocks.1", "blocks.2"]
    assert packed["duration"] == analysis.steps[-1].duration


def test_annotations_nest_in_lanes_of_their_own(traced: tuple[Trace, RankAnalysis]) -> None:
    trace, analysis = traced
    packed = pack_timeline(trace, analysis.steps[-1], 6000)
    assert packed is not None
    for row in packed["rows"]:
        ends: dict[str, int] = {}
        for start, length, lane in zip(accumulate(row["s"]), row["d"], row["l"], strict=True):
            assert ends.get(lane, 0) <= start, row["label"]
            ends[lane] = start + length


def test_many_events_are_drawn_as_few_and_the_page_says_so(traced: tuple[Trace, RankAnalysis]) -> None:
    trace, analysis = traced
    packed = pack_timeline(trace, analysis.steps[-1], 10)
    assert packed is not None
    assert all(len(row["s"]) <= 60 for row in packed["rows"])
    assert "drawn together" in packed["note"]


def test_of_many_threads_the_busiest_are_drawn_and_the_rest_is_counted(
    traced: tuple[Trace, RankAnalysis], monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, analysis = traced
    monkeypatch.setattr("fsdpbench.reports.pages.timeline.MOST_ROWS", 1)
    packed = pack_timeline(trace, analysis.steps[-1], 6000)
    assert packed is not None
    assert packed["rows"][0]["label"] == "compute · stream 7"
    assert sum("stream" in row["label"] for row in packed["rows"]) == 1
    assert "2 streams or threads with less work are left out." in packed["note"]
