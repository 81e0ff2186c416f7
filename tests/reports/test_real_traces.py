"""Traces of other profilers, devices and jobs: each is analysed, or refused with a clear word."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsdpbench.reports.analysis import analyze
from fsdpbench.reports.analysis.memory import memory_curve
from fsdpbench.reports.pages.timeline import stream_rows
from fsdpbench.reports.readers import read_trace

# name: (kind, trusted, steps, collectives by type)
EXPECTED = {
    "amd_mi250": ("gpu", True, [1, 2], {}),
    "cpu_only": ("cpu", True, [551], {"all_reduce": 2}),
    "cuda_event_sync": ("gpu", True, [0], {}),
    "nccl_a100": ("gpu", True, [4, 5, 6], {"all_reduce": 15, "broadcast": 6}),
    "no_gpu": ("cpu", False, [1009], {}),
    "ns_resolution": ("gpu", True, [101, 102, 103, 104, 105], {}),
    "sampled_rank0": ("gpu", True, [551, 552], {"send_recv": 10}),
    "sampled_rank1": ("gpu", True, [551, 552], {"send_recv": 10}),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_analysed(real_traces: Path, name: str) -> None:
    kind, trusted, steps, collectives = EXPECTED[name]
    path = real_traces / f"{name}.json.gz"
    analysis = analyze([path])
    (rank,) = analysis.ranks
    assert (rank.kind, rank.trusted) == (kind, trusted), rank.warnings
    assert [step.index for step in rank.steps] == steps
    assert {name: each.count for name, each in rank.communication.items() if each.count} == collectives
    for step in rank.steps:
        assert step.time.total == step.duration
        assert min(step.time.compute_only, step.time.overlapped, step.time.idle) >= 0
        if step.phases:
            assert sum(parts.total for parts in step.phases.values()) == step.duration
    json.dumps(analysis.to_dict(), allow_nan=False)
    trace = read_trace(path)
    assert stream_rows(trace, rank.steps[0])
    assert len(memory_curve(trace)) == len(trace.memory)


def test_nanoseconds_of_a_trace_that_doubles_cannot_hold(real_traces: Path) -> None:
    trace = read_trace(real_traces / "ns_resolution.json.gz")
    assert 1712195495519689047 in trace.events.start


def test_bandwidth_from_the_metadata_of_a_real_all_reduce(real_traces: Path) -> None:
    (rank,) = analyze([real_traces / "nccl_a100.json.gz"]).ranks
    figures = rank.communication["all_reduce"]
    # ResNet-50 has 25.557 M parameters, all-reduced in fp32 once a step.
    assert figures.bytes == 3 * 25_557_032 * 4
    assert figures.bus_bandwidth is not None
    assert 1e9 < figures.bus_bandwidth < 300e9


def test_two_ranks_of_one_job(real_traces: Path) -> None:
    analysis = analyze([real_traces / f"sampled_rank{rank}.json.gz" for rank in range(2)])
    summary = analysis.across_ranks
    assert summary is not None
    assert (summary.ranks, summary.world_size, summary.missing_ranks) == ((0, 1), 128, 126)
