"""Steps, phases and their parts: a trace whose truth is known, and random ones against brute force."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fsdpbench.reports.analysis import TimeParts, analyze
from fsdpbench.reports.analysis.model import RankAnalysis


def analyzed(built: Any, tmp_path: Path) -> RankAnalysis:
    return analyze([built.write(tmp_path / "rank0_trace.json.gz")]).ranks[0]


def test_known_truth_of_steps_and_phases(tmp_path: Path, fsdp_trace: Any) -> None:
    rank = analyzed(fsdp_trace, tmp_path)
    us = 1000
    assert [step.duration for step in rank.steps] == [1000 * us, 1000 * us]
    for step in rank.steps:
        assert step.time == TimeParts(440 * us, 230 * us, 210 * us, 120 * us)
        assert step.phases == {
            "forward": TimeParts(190 * us, 150 * us, 130 * us, 30 * us),
            "backward": TimeParts(200 * us, 80 * us, 80 * us, 30 * us),
            "optimizer": TimeParts(50 * us, 0, 0, 10 * us),
            "other": TimeParts(0, 0, 0, 50 * us),
        }
    assert rank.overlap_fraction == 230 / 440
    assert rank.trusted
    assert rank.warnings == ()


def test_a_gpu_behind_its_cpu_keeps_its_work_in_its_step(tmp_path: Path, trace_builder: Any) -> None:
    built = trace_builder()
    # The CPU finishes step 0 at 100, its last kernel ends at 250; the work of step 1 follows without a gap.
    built.step(0, 1_000_000, 1_100_000)
    built.kernel("a", 1_050_000, 1_250_000, launch=1_010_000)
    built.step(1, 1_100_000, 1_200_000)
    built.kernel("b", 1_250_000, 1_400_000, launch=1_110_000)
    rank = analyzed(built, tmp_path)
    assert [(step.start, step.end) for step in rank.steps] == [(1_000_000, 1_250_000), (1_250_000, 1_400_000)]
    assert [step.time.compute_only for step in rank.steps] == [200_000, 150_000]


def test_time_between_steps_belongs_to_the_earlier(tmp_path: Path, trace_builder: Any) -> None:
    built = trace_builder()
    built.step(0, 1_000_000, 1_100_000)
    built.kernel("a", 1_020_000, 1_050_000, launch=1_010_000)
    built.step(1, 1_300_000, 1_400_000)
    built.kernel("b", 1_320_000, 1_350_000, launch=1_310_000)
    rank = analyzed(built, tmp_path)
    assert [step.duration for step in rank.steps] == [300_000, 100_000]


def test_copies_alone_are_work_but_hide_no_communication(tmp_path: Path, trace_builder: Any) -> None:
    built = trace_builder()
    built.step(0, 1_000_000, 1_100_000)
    built.kernel("Memcpy DtoD", 1_010_000, 1_030_000, category="gpu_memcpy")
    built.collective("all_gather", 1_020_000, 1_050_000)
    built.kernel("gemm", 1_045_000, 1_060_000)
    built.kernel("Memset (Device)", 1_055_000, 1_070_000, category="gpu_memset")
    rank = analyzed(built, tmp_path)
    assert rank.time == TimeParts(30_000, 5_000, 25_000, 40_000, memory_copy=20_000)


def test_synchronisation_records_are_not_work(tmp_path: Path, trace_builder: Any) -> None:
    built = trace_builder()
    built.step(0, 1_000_000, 1_100_000)
    built.kernel("gemm", 1_010_000, 1_020_000)
    built.kernel("Stream Wait Event", 1_020_000, 1_090_000, category="cuda_sync")
    assert analyzed(built, tmp_path).time == TimeParts(10_000, 0, 0, 90_000)


def test_without_annotations_the_trace_is_one_step(tmp_path: Path, trace_builder: Any) -> None:
    built = trace_builder()
    built.kernel("a", 1_000_000, 1_010_000)
    built.collective("all_reduce", 1_005_000, 1_030_000)
    rank = analyzed(built, tmp_path)
    assert [(step.start, step.end) for step in rank.steps] == [(1_000_000, 1_030_000)]
    assert rank.phases == {}
    assert rank.units == ()
    assert any("no step annotations" in warning for warning in rank.warnings)


def test_phases_of_traces_without_our_annotations(tmp_path: Path, trace_builder: Any) -> None:
    built = trace_builder()
    built.step(3, 1_000_000, 1_100_000)
    built.annotation("## forward ##", 1_000_000, 1_020_000)
    built.kernel("f", 1_010_000, 1_030_000, launch=1_005_000)
    autograd = (100, 999)
    built.op("autograd::engine::evaluate_function: MmBackward0", 1_030_000, 1_050_000, lane=autograd)
    built.kernel("b", 1_040_000, 1_060_000, launch=1_035_000, lane=autograd)
    built.annotation("Optimizer.step#AdamW.step", 1_060_000, 1_070_000)
    built.kernel("o", 1_070_000, 1_080_000, launch=1_065_000)
    rank = analyzed(built, tmp_path)
    assert rank.phases == {
        "forward": TimeParts(20_000, 0, 0, 10_000),
        "backward": TimeParts(20_000, 0, 0, 10_000),
        "optimizer": TimeParts(10_000, 0, 0, 10_000),
        "other": TimeParts(0, 0, 0, 20_000),
    }


def test_gradient_accumulation_adds_up_by_phase(tmp_path: Path, trace_builder: Any) -> None:
    built = trace_builder()
    built.step(0, 1_000_000, 1_100_000)
    for microbatch in range(2):
        t = 1_000_000 + 40_000 * microbatch
        built.annotation("forward", t, t + 15_000)
        built.kernel("f", t + 10_000, t + 15_000)
        built.annotation("backward", t + 20_000, t + 35_000)
        built.kernel("b", t + 25_000, t + 35_000)
    rank = analyzed(built, tmp_path)
    assert rank.phases["forward"] == TimeParts(10_000, 0, 0, 20_000)
    assert rank.phases["backward"] == TimeParts(20_000, 0, 0, 10_000)
    assert sum(parts.total for parts in rank.phases.values()) == 100_000


@pytest.mark.parametrize("seed", range(12))
def test_random_traces_against_counting_every_nanosecond(
    tmp_path: Path, trace_builder: Any, seed: int
) -> None:
    rng = random.Random(seed)
    base, span = 10_000, 900
    built = trace_builder()
    computing, communicating, copying = set(), set(), set()
    cuts = sorted(rng.sample(range(50, span - 50), 2))
    bounds = [0, *cuts, span]
    for step, (low, high) in enumerate(pairwise(bounds)):
        built.step(step, base + low, base + high)
    for stream in range(4):
        at = rng.randrange(30)
        while at < span - 60:
            length = rng.randrange(1, 50)
            end = min(at + length, span)
            points = range(at, end)
            launch = base + at
            if stream == 0 or rng.random() < 0.1:
                computing.update(points)
                built.kernel("gemm", base + at, base + end, stream=stream, launch=launch)
            elif stream == 3:
                copying.update(points)
                built.kernel("m", base + at, base + end, stream=3, launch=launch, category="gpu_memcpy")
            else:
                communicating.update(points)
                kind = rng.choice(["all_gather", "reduce_scatter", "all_reduce"])
                built.collective(kind, base + at, base + end, stream=stream, launch=launch)
            at = end + rng.randrange(0, 40)
    rank = analyzed(built, tmp_path)
    for step in rank.steps:
        window = set(range(step.start - base, step.end - base))
        assert step.time == TimeParts(
            compute_only=len(((computing | copying) - communicating) & window),
            overlapped=len(computing & communicating & window),
            exposed_communication=len((communicating - computing) & window),
            idle=len(window - computing - communicating - copying),
            memory_copy=len((copying - computing - communicating) & window),
        )
        assert step.time.total == step.duration
        kinds = step.communication.values()
        assert sum(each.exposed for each in kinds) >= step.time.exposed_communication
    assert rank.time.total == rank.steps[-1].end - rank.steps[0].start


def test_the_mean_step_sums_exactly() -> None:
    parts = TimeParts(100, 10, 7, 5)
    mean = parts.per(3)
    assert mean.total == 122 // 3
    assert (mean.compute_only, mean.overlapped, mean.exposed_communication) == (33, 3, 2)
