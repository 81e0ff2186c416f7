"""The gate: what takes the trust away, and what is only remarked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fsdpbench.reports.analysis import analyze
from fsdpbench.reports.analysis.model import RankAnalysis


def analyzed(built: Any, tmp_path: Path) -> RankAnalysis:
    return analyze([built.write(tmp_path / "rank0_trace.json")]).ranks[0]


def told(rank: RankAnalysis) -> str:
    return " / ".join(rank.warnings)


def test_overlapping_kernels_of_one_stream(tmp_path: Path, trace_builder: Any) -> None:
    built = trace_builder()
    built.step(0, 1_000_000, 1_100_000)
    built.kernel("a", 1_010_000, 1_050_000)
    built.kernel("b", 1_040_000, 1_060_000)
    rank = analyzed(built, tmp_path)
    assert not rank.trusted
    assert "1 of 2 kernels overlap their predecessor" in told(rank)


def test_kernels_that_drain_while_the_next_begins(tmp_path: Path, trace_builder: Any) -> None:
    built = trace_builder()
    built.step(0, 1_000_000, 2_000_000)
    for number in range(9):
        start = 1_010_000 + number * 100_000
        built.kernel("a", start, start + 100_900 if number < 8 else start + 50_000)
    built.kernel("b", 1_958_500, 1_970_000)
    built.kernel("c", 1_968_000, 1_980_000)
    rank = analyzed(built, tmp_path)
    assert rank.trusted
    assert "1 of 11 kernels overlap their predecessor on the same stream, by little" in told(rank)


def test_other_streams_and_rounding_may_overlap(tmp_path: Path, trace_builder: Any) -> None:
    built = trace_builder()
    built.step(0, 1_000_000, 1_100_000)
    built.kernel("a", 1_010_000, 1_050_000)
    built.kernel("b", 1_049_500, 1_060_000)
    built.kernel("c", 1_020_000, 1_090_000, stream=9)
    assert analyzed(built, tmp_path).trusted


def test_kernels_on_several_devices(tmp_path: Path, trace_builder: Any) -> None:
    built = trace_builder()
    built.step(0, 1_000_000, 1_100_000)
    built.kernel("a", 1_010_000, 1_050_000)
    built.kernel("b", 1_010_000, 1_050_000)["args"]["device"] = 3
    rank = analyzed(built, tmp_path)
    assert rank.trusted
    assert "kernels ran on devices 0, 3" in told(rank)


def test_launches_without_kernels(tmp_path: Path, trace_builder: Any) -> None:
    built = trace_builder()
    built.step(0, 1_000_000, 1_100_000)
    built.kernel("a", 1_010_000, 1_050_000)
    built.event("cuda_runtime", "cudaLaunchKernel", 1_020_000, 900, args={"correlation": 77})
    rank = analyzed(built, tmp_path)
    assert not rank.trusted
    assert "1 of 2 kernel launches have no kernel" in told(rank)


def test_device_events_that_cannot_be_placed(tmp_path: Path, trace_builder: Any) -> None:
    built = trace_builder()
    built.step(0, 4_000_000_000, 4_000_100_000)
    built.kernel("a", 4_000_010_000, 4_000_050_000)
    built.kernel("lost", 0, 1_000, launch=4_000_020_000)
    built.kernel("back", 4_000_060_000, 4_000_050_000)
    rank = analyzed(built, tmp_path)
    assert not rank.trusted
    assert "time stamp 0" in told(rank)
    assert "negative duration" in told(rank)
    assert "2 device events could not be placed" in told(rank)
    assert rank.time.compute_only == 40_000


def test_nccl_without_device_events(tmp_path: Path, trace_builder: Any) -> None:
    built = trace_builder()
    built.step(0, 1_000_000, 1_100_000)
    built.op("aten::mm", 1_010_000, 1_020_000)
    built.annotation("nccl:all_reduce", 1_030_000, 1_040_000)
    rank = analyzed(built, tmp_path)
    assert not rank.trusted
    assert "ProfilerActivity.CUDA" in told(rank)
    assert rank.overlap_fraction is None


def test_missing_and_repeated_steps(tmp_path: Path, trace_builder: Any) -> None:
    built = trace_builder()
    for place, number in enumerate((3, 4, 7, 7)):
        start = 1_000_000 + place * 100_000
        built.step(number, start, start + 100_000)
        built.kernel("a", start + 10_000, start + 50_000)
    rank = analyzed(built, tmp_path)
    assert "steps 5, 6 are missing" in told(rank)
    assert "repeat" in told(rank)


def test_events_without_launch_are_placed_by_their_own_time(tmp_path: Path, trace_builder: Any) -> None:
    built = trace_builder()
    for number in range(2):
        start = 1_000_000 + number * 100_000
        built.step(number, start, start + 100_000)
        built.event("kernel", "a", start + 10_000, 30_000, lane=(0, 7), args={"stream": 7})
    rank = analyzed(built, tmp_path)
    assert [step.time.compute_only for step in rank.steps] == [30_000, 30_000]
    assert "2 of 2 device events have no launch" in told(rank)


def test_a_clean_trace_has_no_warnings(tmp_path: Path, fsdp_trace: Any) -> None:
    rank = analyzed(fsdp_trace, tmp_path)
    assert rank.trusted
    assert rank.warnings == ()
