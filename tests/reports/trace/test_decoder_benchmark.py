"""How fast traces are read and analysed (`pytest -n 0 --benchmark-enable`); without that, that they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdpbench.reports.analysis import analyze_trace
from fsdpbench.reports.readers import read_trace

KERNELS = 4000


@pytest.fixture
def long_trace(tmp_path: Path, trace_builder: Any) -> Path:
    """Ten steps of 400 kernels, an operator and a launch each, and an FSDP all-gather every tenth."""
    built = trace_builder()
    for number in range(KERNELS):
        at = 1_000_000 + number * 20_000
        if number % 400 == 0:
            built.step(number // 400, at, at + 8_000_000)
        built.op("aten::mm", at, at + 4_000)
        built.kernel("gemm", at + 5_000, at + 23_000, launch=at + 1_000)
        if number % 10 == 0:
            unit = f"blocks.{number % 400 // 10}"
            built.annotation(f"FSDP::all_gather ({unit})", at + 6_000, at + 9_000)
            built.collective("all_gather", at + 10_000, at + 90_000, launch=at + 7_000, elements=8000)
            built.annotation(f"FSDP::wait_all_gather ({unit})", at + 9_500, at + 9_900)
    return built.write(tmp_path / "rank0_trace.json.gz")


def test_read(benchmark: Any, long_trace: Path) -> None:
    trace = benchmark(read_trace, long_trace)
    assert len(trace.events) == KERNELS * 3 + KERNELS // 10 * 4 + 10


def test_analyse(benchmark: Any, long_trace: Path) -> None:
    rank = benchmark(analyze_trace, read_trace(long_trace))
    assert len(rank.steps) == 10
    assert len(rank.units) == 40
