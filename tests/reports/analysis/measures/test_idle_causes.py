"""Why the device idles: each cause planted alone, and their sum."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdpbench.reports.analysis import RankAnalysis, analyze
from fsdpbench.reports.analysis.text import describe

US = 1000


def at(us: float) -> int:
    return 1_000_000 + int(us * US)


def analyzed(built: Any, tmp_path: Path) -> RankAnalysis:
    rank = analyze([built.write(tmp_path / "rank0_trace.json")]).ranks[0]
    assert sum(rank.idle_causes.parts().values()) == rank.time.idle
    return rank


def two_kernels(built: Any, *, launch: int, start: int) -> None:
    """A kernel until 100 us, and the next, launched and started at these times (us)."""
    built.step(0, at(0), at(1000))
    built.kernel("gemm", at(0), at(100), launch=at(0))
    built.kernel("gemm", at(start), at(1000), launch=at(launch))


@pytest.mark.parametrize(
    ("cause", "plant"),
    [
        ("cpu", lambda built: None),
        ("allocator", lambda built: built.event("cuda_runtime", "cudaFree", at(50), 450 * US, args={})),
        (
            "synchronization",
            lambda built: built.event("cuda_runtime", "cudaStreamSynchronize", at(50), 450 * US, args={}),
        ),
        ("rate_limiter", lambda built: built.annotation("FSDP::limiter_wait (b.0)", at(50), at(500))),
    ],
)
def test_what_held_the_cpu(cause: str, plant: Any, tmp_path: Path, trace_builder: Any) -> None:
    built = trace_builder()
    two_kernels(built, launch=500, start=510)
    plant(built)
    rank = analyzed(built, tmp_path)
    expected = {
        **dict.fromkeys(rank.idle_causes.parts(), 0),
        cause: 400 * US,
        "launch_latency": 10 * US,
    }
    assert rank.idle_causes.parts() == expected
    assert "idle because of 0.400 ms" in describe(analyze([tmp_path]))


def test_work_that_was_launched_and_waited(tmp_path: Path, trace_builder: Any) -> None:
    built = trace_builder()
    two_kernels(built, launch=90, start=300)
    assert analyzed(built, tmp_path).idle_causes.event == 200 * US


def test_the_limiter_waits_by_synchronising_and_counts_once(tmp_path: Path, trace_builder: Any) -> None:
    built = trace_builder()
    two_kernels(built, launch=500, start=500)
    built.annotation("FSDP::limiter_wait (b.0)", at(100), at(300))
    built.event("cuda_runtime", "cudaEventSynchronize", at(110), 180 * US, args={})
    causes = analyzed(built, tmp_path).idle_causes
    assert (causes.rate_limiter, causes.synchronization, causes.cpu) == (200 * US, 0, 200 * US)


def test_a_trace_without_launches_tells_no_cause(tmp_path: Path, trace_builder: Any) -> None:
    built = trace_builder()
    two_kernels(built, launch=500, start=500)
    built.events = [event for event in built.events if event["cat"] != "cuda_runtime"]
    assert analyzed_causes(built, tmp_path) == {}


def analyzed_causes(built: Any, tmp_path: Path) -> dict[str, int]:
    return analyze([built.write(tmp_path / "rank0_trace.json")]).ranks[0].idle_causes.parts()
