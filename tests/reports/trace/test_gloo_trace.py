"""A CPU trace as torch really writes it: two gloo ranks under `torch.profiler`."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from fsdpbench.reports.analysis import Analysis, analyze

RANK_PROGRAM = """
import sys, torch, torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function, schedule
rank, folder = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
model = torch.nn.Linear(256, 256)
x = torch.randn(64, 256)
save = lambda p: p.export_chrome_trace(f"{folder}/trace/rank{rank}_trace.json")
with profile(activities=[ProfilerActivity.CPU], schedule=schedule(wait=0, warmup=1, active=2),
             on_trace_ready=save, profile_memory=True, record_shapes=True) as profiler:
    for _ in range(3):
        with record_function("forward"):
            whole = torch.empty(2 * 256 * 256)
            with record_function("FSDP::all_gather (blocks.0)"):
                work = dist.all_gather_into_tensor(whole, model.weight.data.view(-1), async_op=True)
            with record_function("FSDP::all_gather (blocks.1)"):
                parts = [dist.broadcast(torch.empty(256 * 64), src, async_op=True) for src in range(2)]
            y = model(x)
            work.wait()
            [part.wait() for part in parts]
        with record_function("backward"), torch.autograd.set_multithreading_enabled(False):
            y.sum().backward()
            with record_function("FSDP::reduce_scatter (blocks.0)"):
                dist.reduce_scatter_tensor(torch.empty(256 * 128), model.weight.grad.view(-1))
            with record_function("FSDP::reduce_scatter (blocks.1)"):
                sizes = [0, 512] if rank == 0 else [512, 0]
                dist.all_to_all_single(torch.empty(512), torch.empty(512), sizes, sizes)
            dist.all_reduce(model.bias.grad)
        profiler.step()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def folder(in_forks: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gloo")
    (folder / "trace").mkdir()
    for done in in_forks(RANK_PROGRAM, [[str(rank), str(folder)] for rank in range(2)]):
        assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def analysis(folder: Path) -> Analysis:
    return analyze([folder / "trace"])


def raw_events(folder: Path, rank: int) -> list[dict[str, Any]]:
    """The file's events; times as decimals: a double of their size is a nanosecond too coarse."""
    text = (folder / "trace" / f"rank{rank}_trace.json").read_text()
    return json.loads(text, parse_float=Decimal)["traceEvents"]


def test_ranks_steps_and_phases(analysis: Analysis) -> None:
    assert [rank.rank for rank in analysis.ranks] == [0, 1]
    for rank in analysis.ranks:
        assert rank.kind == "cpu"
        assert rank.trusted, rank.warnings
        assert [step.index for step in rank.steps] == [1, 2]
        assert {"forward", "backward", "other"} == set(rank.phases)
        assert sum(parts.total for parts in rank.phases.values()) == rank.time.total
        assert rank.steps[0].end == rank.steps[1].start


def test_collectives_are_what_was_asked_for(analysis: Analysis) -> None:
    """Gloo carries out a reduce-scatter as an all-reduce; the operator that asked for it tells. Broadcasts in
    an all-gather's annotation are one all-gather, and an all-to-all in a reduce-scatter's lacks a rank's own
    part."""
    for rank in analysis.ranks:
        found = {name: (each.count, each.bytes) for name, each in rank.communication.items()}
        assert found == {
            "all_gather": (4, 2 * 2 * 256 * 256 * 4 + 2 * 2 * 256 * 64 * 4),
            "reduce_scatter": (4, 2 * 256 * 256 * 4 + 2 * 2 * 512 * 4),
            "all_reduce": (2, 2 * 256 * 4),
        }
        unit, other = rank.units
        assert (unit.unit, other.unit) == ("blocks.0", "blocks.1")
        assert {name: each.count for name, each in other.communication.items()} == {
            "all_gather": 2,
            "reduce_scatter": 2,
        }
        assert {name: each.count for name, each in unit.communication.items()} == {
            "all_gather": 2,
            "reduce_scatter": 2,
        }


def test_overlap_is_that_of_gloo_spans_and_operators(analysis: Analysis, folder: Path) -> None:
    """Against counting on the raw events: union of gloo:* with union of aten::* on other threads, in ns."""
    for rank in analysis.ranks:
        events = [event for event in raw_events(folder, rank.rank) if event["ph"] == "X"]
        gloo = [event for event in events if event["name"].startswith("gloo:")]
        threads = {event["tid"] for event in gloo}
        operators = [e for e in events if e["name"].startswith("aten::") and e["tid"] not in threads]
        assert gloo
        assert operators
        low, high = rank.steps[0].start, rank.steps[-1].end
        communication, computation = union(gloo, low, high), union(operators, low, high)
        hidden = sum(max(0, min(e, f) - max(s, t)) for s, e in communication for t, f in computation)
        total = sum(end - start for start, end in communication)
        assert rank.time.overlapped == hidden
        assert rank.time.exposed_communication == total - hidden
        assert rank.overlap_fraction == hidden / total


def union(events: list[dict[str, Any]], low: int, high: int) -> list[list[int]]:
    merged: list[list[int]] = []
    pairs = [(int(e["ts"] * 1000), int((e["ts"] + e["dur"]) * 1000)) for e in events]
    for start, end in sorted((max(start, low), min(end, high)) for start, end in pairs):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return merged


def test_across_ranks(analysis: Analysis) -> None:
    summary = analysis.across_ranks
    assert summary is not None
    assert (summary.ranks, summary.world_size, summary.missing_ranks, summary.warnings) == ((0, 1), 2, 0, ())
    times = [rank.mean_step.total / 1e9 for rank in analysis.ranks]
    step = summary.figures["step_time_s"]
    assert (step.least, step.greatest) == (min(times), max(times))
    assert summary.slowest_rank == times.index(max(times))


def test_memory_of_the_host(analysis: Analysis) -> None:
    for rank in analysis.ranks:
        assert rank.memory.peak_allocated is not None
        assert rank.memory.peak_allocated >= 2 * 256 * 256 * 4
        assert rank.memory.peak_reserved is None
