"""The figures of a result from records and traces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdpbench.reports.analysis import Analysis, analyze
from fsdpbench.reports.figures import computed
from fsdpbench.reports.rank_record import RankRecord


def record(rank: int = 0, **changes: Any) -> RankRecord:
    memory = {"allocated": 100, "active": 120, "reserved": 200, "alloc_retries": 0, "ooms": 0}
    return RankRecord.of(
        {
            "schema": 1,
            "rank": rank,
            "world_size": 8,
            "device": "sim",
            "losses": None,
            "step_times_s": [0.5, 0.1, 0.2],
            "memory_per_step": [memory, memory | {"allocated": 150, "alloc_retries": 3}],
            "flops_per_step": {"model": 2e12, "hardware": 3e12},
            "samples_per_step": 4,
            "tokens_per_step": 4096,
            "peak_flops": 100e12,
            "trace": "trace/rank0_trace.json.gz",
        }
        | changes
    )


@pytest.fixture
def analysis(tmp_path: Path, fsdp_trace: Any) -> Analysis:
    return analyze([fsdp_trace.write(tmp_path / "rank0_trace.json.gz")])


def test_rates_and_utilisation(analysis: Analysis) -> None:
    figures = computed([record()], analysis)
    assert figures["step_time_s"] == 0.2
    assert figures["samples_per_s_per_gpu"] == 20
    assert figures["tokens_per_s_per_gpu"] == 20480
    assert figures["tflops_per_gpu"] == pytest.approx(10)
    assert figures["hardware_tflops_per_gpu"] == pytest.approx(15)
    assert figures["mfu"] == pytest.approx(0.10)
    assert figures["hfu"] == pytest.approx(0.15)
    assert figures["loss"] is None


def test_the_slowest_rank_and_the_greatest_peak_count(analysis: Analysis) -> None:
    memory = {"allocated": 90, "active": 130, "reserved": 250, "alloc_retries": 1, "ooms": 1}
    figures = computed([record(), record(1, step_times_s=[0.3, 0.4], memory_per_step=[memory])], analysis)
    assert figures["step_time_s"] == 0.35
    assert figures["peak_memory_bytes"] == {"allocated": 150, "active": 130, "reserved": 250}
    assert figures["alloc_retries_per_step"] == 1.5
    assert figures["ooms"] == 1


def test_times_come_from_the_trace_and_sum(analysis: Analysis) -> None:
    figures = computed([record()], analysis)
    assert figures["traced_step_time_s"] == 0.001
    assert figures["time_s"] == {
        "compute_only": 0.00044,
        "overlapped": 0.00023,
        "exposed_communication": 0.00021,
        "idle": 0.00012,
    }
    assert figures["overlap_fraction"] == 230 / 440
    gather = figures["communication"]["all_gather"]
    assert (gather["count"], gather["bytes"], gather["time_s"]) == (2, 32_000_000, 0.00028)
    assert figures["communication"]["all_reduce"]["count"] == 0


def test_the_traces_verdict_comes_along(analysis: Analysis) -> None:
    figures = computed([record()], analysis)
    assert figures["trace_trusted"] is True
    assert figures["trace_warnings"] == []
    assert figures["verdict"]["outcome"] == "found"
    bare = computed([record()], Analysis(ranks=(), configurations={}))
    assert bare.keys() == figures.keys()
    assert bare["traced_step_time_s"] is bare["verdict"] is None
    assert bare["step_time_s"] == 0.2


def test_what_cannot_be_known_is_none(analysis: Analysis) -> None:
    bare = record(tokens_per_step=None, memory_per_step=None, peak_flops=None)
    figures = computed([bare], analysis)
    for name in ("tokens_per_s_per_gpu", "mfu", "hfu", "peak_memory_bytes", "alloc_retries_per_step", "ooms"):
        assert figures[name] is None
    assert figures["tflops_per_gpu"] == pytest.approx(10)


def test_loss_is_the_mean_over_ranks(analysis: Analysis) -> None:
    figures = computed([record(losses=[2.0, 1.0]), record(1, losses=[4.0, 2.0])], analysis)
    assert figures["loss"] == [3.0, 1.5]
    assert computed([record(losses=[2.0]), record(1)], analysis)["loss"] is None
