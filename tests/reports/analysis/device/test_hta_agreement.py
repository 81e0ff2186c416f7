"""HolisticTraceAnalysis and our analysis say the same about the overlap of traces that both can read."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from fsdpbench.reports.analysis import analyze
from fsdpbench.reports.readers.hta import hta_critical_path, hta_overlap, hta_queue_length


def ours(path: Path) -> float:
    overlap = analyze([path]).ranks[0].overlap_fraction
    assert overlap is not None
    return overlap


def test_known_truth(tmp_path: Path, fsdp_trace: Any) -> None:
    path = fsdp_trace.write(tmp_path / "rank0_trace.json.gz")
    assert ours(path) == 230 / 440
    assert hta_overlap(path) == pytest.approx(230 / 440, abs=1e-4)


def test_short_kernels_random_ones_and_synchronisation_records(tmp_path: Path, trace_builder: Any) -> None:
    rng = random.Random(5)
    built = trace_builder()
    for step in range(3):
        start = 1_000_000 + step * 400_000
        built.step(step, start, start + 400_000)
        for stream in range(3):
            at = start + 6_000
            while at < start + 380_000:
                length = rng.randrange(300, 2_500)
                if stream == 0:
                    built.kernel("gemm", at, at + length, stream=7, launch=at - 5_000)
                else:
                    built.collective("all_gather", at, at + length, stream=20 + stream, launch=at - 5_000)
                built.kernel("Stream Wait Event", at, at + length + 400, stream=7, category="cuda_sync")
                at += length + rng.randrange(1, 1_500)
    path = built.write(tmp_path / "rank0_trace.json.gz")
    assert hta_overlap(path) == pytest.approx(ours(path), abs=1e-4)


def test_the_critical_path_of_a_step(tmp_path: Path, trace_builder: Any) -> None:
    """Kernels back to back on one stream: the path is their sum, and the launch before them."""
    built = trace_builder()
    for step in range(3):
        start = 1_000_000 + step * 400_000
        built.step(step, start, start + 400_000)
        built.op("aten::mm", start + 5_000, start + 50_000)
        for number in range(10):
            at = start + 10_000 + number * 30_000
            built.kernel("gemm", at, at + 30_000, launch=start + 6_000 + number * 2_000)
        built.event("cuda_runtime", "cudaDeviceSynchronize", start + 60_000, 255_000, args={"correlation": 0})
    path = hta_critical_path(built.write(tmp_path / "rank0_trace.json.gz"), 0)
    assert path["gpu_compute_bound"] == pytest.approx(300e-6)
    assert sum(path.values()) == pytest.approx(400e-6, rel=0.3)


def test_the_queue_of_a_stream(tmp_path: Path, trace_builder: Any) -> None:
    built = trace_builder()
    for step in range(2):
        start = 1_000_000 + step * 400_000
        built.step(step, start, start + 400_000)
        for number in range(10):
            at = start + 30_000 + number * 30_000
            built.kernel("gemm", at, at + 30_000, launch=start + 1_000 + number * 2_000)
    queue = hta_queue_length(built.write(tmp_path / "rank0_trace.json.gz"))
    assert list(queue) == [7]
    assert 3 < queue[7] < 10


def test_a_real_trace(real_traces: Path) -> None:
    path = real_traces / "nccl_a100.json.gz"
    assert hta_overlap(path) == pytest.approx(ours(path), abs=5e-3)
