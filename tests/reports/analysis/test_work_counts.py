"""Kernels, copies and limiter waits are counted within the annotated steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fsdpbench.reports.analysis import analyze
from fsdpbench.reports.result_figures import result_figures


def test_counts_of_a_mean_step(tmp_path: Path, fsdp_trace: Any) -> None:
    start = 2_000_000  # the second step of two
    fsdp_trace.annotation("FSDP::limiter_wait (blocks.1)", start + 15_000, start + 16_000)
    fsdp_trace.kernel(
        "void direct_copy_kernel_cuda", start + 960_000, start + 970_000, launch=start + 520_000
    )
    fsdp_trace.kernel("a kernel before all steps", 500_000, 600_000, launch=400_000)
    analysis = analyze([fsdp_trace.write(tmp_path / "rank0_trace.json.gz")])
    (rank,) = analysis.ranks
    assert rank.work.to_dict() == {"kernels": 11, "copies": 1, "limiter_waits": 1}
    figures = result_figures([], analysis)
    assert figures["work"] == {"kernels": 5.5, "copies": 0.5, "limiter_waits": 0.5}
