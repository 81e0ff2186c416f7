"""The trace of a simulated step: what Kineto readers need, and what HTA makes of it."""

from __future__ import annotations

import gzip
import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.simulated


def traced_steps(folder: Path, system: str = "fsdp2", steps: int = 3) -> tuple[dict[str, Any], Any]:
    """The trace of some training steps, and the simulation."""
    from device_training import build, start

    sim = start()
    step = build(system, 8, {"layers": 3, "width": 1024}, (8, 512))
    step()
    path = folder / "rank0_trace.json.gz"
    with sim.trace(path) as trace:
        for _ in range(steps):
            for phase in ("whole",):
                with torch.profiler.record_function(phase):
                    step()
            sim.synchronize()
            trace.step()
    with gzip.open(path) as file:
        return json.load(file), sim


def spans(trace: dict[str, Any], category: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event.get("cat") == category]


def union(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def common(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> int:
    return sum(max(0, min(a[1], b[1]) - max(a[0], b[0])) for a in first for b in second)


def nanoseconds(event: dict[str, Any]) -> tuple[int, int]:
    start = round(event["ts"] * 1000)
    return start, start + round(event["dur"] * 1000)


def test_hta_agrees_with_brute_force(tmp_path: Path) -> None:
    """HTA leaves the last step out; within its figures' two digits both agree."""
    os.environ["HTA_DISABLE_NS_ROUNDING"] = "1"
    trace, _ = traced_steps(tmp_path)
    from hta.trace_analysis import TraceAnalysis

    analysis = TraceAnalysis(trace_dir=str(tmp_path))
    reported = float(analysis.get_comm_comp_overlap(visualize=False)["comp_comm_overlap_pctg"].iloc[0])
    steps = [event for event in spans(trace, "user_annotation") if event["name"].startswith("ProfilerStep#")]
    last = max(nanoseconds(step)[0] for step in steps)
    kernels = [event for event in spans(trace, "kernel") if nanoseconds(event)[0] < last]
    communication = union([nanoseconds(event) for event in kernels if event["name"].startswith("nccl")])
    computation = union([nanoseconds(event) for event in kernels if not event["name"].startswith("nccl")])
    total = sum(end - start for start, end in communication)
    assert total > 0
    expected = 100 * common(communication, computation) / total
    assert 5 < expected < 100
    assert abs(reported - expected) < 0.01, (reported, expected)


def test_steps_and_fsdp_units_are_annotated(tmp_path: Path) -> None:
    trace, _ = traced_steps(tmp_path)
    names = [event["name"] for event in spans(trace, "user_annotation")]
    assert [name for name in names if name.startswith("ProfilerStep#")] == [
        f"ProfilerStep#{k}" for k in range(3)
    ]
    assert names.count("whole") == 3
    assert any(name.startswith("FSDP::all_gather (blocks.0)") for name in names), sorted(set(names))
    assert trace["fsdpbench"]["simulated"] is True


def test_every_kernel_has_its_launch(tmp_path: Path) -> None:
    """Kernels start after their launch has begun, and operators enclose launches."""
    trace, _ = traced_steps(tmp_path)
    launches = {
        event["args"]["correlation"]: nanoseconds(event)
        for event in spans(trace, "cuda_runtime")
        if "Launch" in event["name"]
    }
    kernels = spans(trace, "kernel")
    assert len(kernels) > 100
    for kernel in kernels:
        assert nanoseconds(kernel)[0] >= launches[kernel["args"]["correlation"]][0]
    collectives = [kernel for kernel in kernels if kernel["name"].startswith("nccl")]
    for kernel in collectives:
        assert kernel["args"]["Group size"] == 8
        assert kernel["args"]["dtype"] == "BFloat16"
    assert {kernel["args"]["Collective name"] for kernel in collectives} == {
        "_allgather_base",
        "_reduce_scatter_base",
    }


def test_host_spans_nest(tmp_path: Path) -> None:
    """Perfetto's rule for complete events of one thread."""
    trace, _ = traced_steps(tmp_path, "fsdp1")
    host = [e for e in trace["traceEvents"] if e.get("cat") in ("cpu_op", "user_annotation", "cuda_runtime")]
    threads: dict[Any, list[tuple[int, int]]] = {}
    for event in host:
        threads.setdefault((event["pid"], event["tid"]), []).append(nanoseconds(event))
    for intervals in threads.values():
        open_ends: list[int] = []
        for start, end in sorted(intervals, key=lambda span: (span[0], -span[1])):
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1], (start, end, open_ends)
            open_ends.append(end)


def test_streams_do_one_thing_at_a_time(tmp_path: Path) -> None:
    trace, _ = traced_steps(tmp_path)
    streams: dict[int, list[tuple[int, int]]] = {}
    for kernel in spans(trace, "kernel"):
        streams.setdefault(kernel["args"]["stream"], []).append(nanoseconds(kernel))
    assert len(streams) > 2
    for intervals in streams.values():
        ordered = sorted(intervals)
        assert all(first[1] <= second[0] for first, second in pairwise(ordered))


def test_memory_events_add_up(tmp_path: Path) -> None:
    """The running total of the events is the total that they carry."""
    trace, _ = traced_steps(tmp_path)
    events = [event["args"] for event in trace["traceEvents"] if event.get("name") == "[memory]"]
    assert len(events) > 100
    before = events[0]["Total Allocated"] - events[0]["Bytes"]
    for event in events:
        before += event["Bytes"]
        assert event["Total Allocated"] == before
        assert event["Total Reserved"] >= before
        assert event["Device Type"] == 1


def test_traces_do_not_nest_and_errors_write_none(tmp_path: Path) -> None:
    from device_training import start

    sim = start()
    with sim.trace(tmp_path / "outer.json.gz"), pytest.raises(RuntimeError, match="do not nest"):
        sim.trace(tmp_path / "inner.json.gz").__enter__()
    assert (tmp_path / "outer.json.gz").exists()
    with pytest.raises(ValueError, match="boom"), sim.trace(tmp_path / "failed.json.gz"):
        raise ValueError("boom")
    assert not (tmp_path / "failed.json.gz").exists()
    with sim.trace(tmp_path / "again.json.gz"):
        torch.ones(3, device="sim")


def test_retries_are_marked(tmp_path: Path) -> None:
    """An allocation that only fits after the cache is given back."""
    from device_training import start

    sim = start()
    path = tmp_path / "rank0_trace.json.gz"
    with sim.trace(path):
        for _ in range(3):
            cached = torch.empty(24 << 30, device="sim", dtype=torch.uint8)
        del cached
        torch.empty(60 << 30, device="sim", dtype=torch.uint8)
    with gzip.open(path) as file:
        retries = [event for event in json.load(file)["traceEvents"] if event.get("name") == "[alloc_retry]"]
    assert len(retries) == torch.sim.memory_stats()["num_alloc_retries"] == 1
    assert retries[0]["args"]["Freed"] == 48 << 30


def test_a_retry_s_driver_calls_are_in_the_trace(tmp_path: Path) -> None:
    """The refused cudaMalloc, the cudaFree that waits for the device, and the cudaMalloc that succeeds."""
    from device_training import start

    sim = start()
    gib = 1 << 30
    with sim.trace(tmp_path / "rank0_trace.json.gz") as trace:
        first = torch.empty(40 * gib, device="sim", dtype=torch.int8)
        for _ in range(16):
            first.zero_()
        del first
        second = torch.empty(60 * gib, device="sim", dtype=torch.int8)
        trace.step()
    assert second.numel() == 60 * gib
    with gzip.open(tmp_path / "rank0_trace.json.gz") as file:
        written = json.load(file)
    calls = [e for e in spans(written, "cuda_runtime") if e["name"] in ("cudaMalloc", "cudaFree")]
    assert [call["name"] for call in calls] == ["cudaMalloc", "cudaMalloc", "cudaFree", "cudaMalloc"]
    kernel = spans(written, "kernel")[-1]
    freeing, (retry,) = calls[2], [e for e in written["traceEvents"] if e["name"] == "[alloc_retry]"]
    assert freeing["ts"] < nanoseconds(kernel)[1] / 1000 < freeing["ts"] + freeing["dur"]
    assert retry["ts"] == pytest.approx(freeing["ts"] + freeing["dur"])
    assert retry["ts"] == pytest.approx(calls[3]["ts"])
