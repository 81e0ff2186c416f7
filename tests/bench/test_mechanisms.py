"""The mechanisms that the FSDP paper explains, seen on simulated GPUs: the code is run, nothing is assumed.

Each test compares configurations that differ in one setting, and looks into the trace for the reason.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fsdpbench.base.settings import Settings
from fsdpbench.cli.requests.request import target_of
from fsdpbench.engine.results.provenance import content_key
from fsdpbench.engine.results.store import Store
from fsdpbench.launch.pool import PointPool
from fsdpbench.reports.analysis import analyze
from fsdpbench.sweep.planning import make_config, without_absent

GPT_175B = {"model": "gpt-175b", "gpus": 128, "shape": "layers=12"}
"""Twelve blocks of the 175B shape on 16 nodes: the same units and collectives, a tenth of the time to run."""
GPT_2_8B = {"model": "gpt-2.8b", "gpus": 8}
SHALLOW = {**GPT_2_8B, "shape": "layers=8"}

Run = Callable[..., tuple[dict[str, Any], Path]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs one configuration on `sim`; the result, and the folder that holds its trace."""
    store = Store.open_or_create(tmp_path_factory.mktemp("mechanisms") / "runs")
    store.write_space({"schema": 1}, [])
    pool = PointPool(jobs=1)

    def call(target: dict[str, Any], system: str, **settings: Any) -> tuple[dict[str, Any], Path]:
        chosen, _ = target_of({**target, "device": "sim"})
        config = without_absent(make_config(chosen, system, Settings.of(**settings), chosen.workload()))
        done = store.finished().get(content_key(config))
        if done is not None:
            return done.result.to_dict(), done.folder
        pool.start(config, store.work_folder(config))
        ((_, work, result),) = pool.finished(wait_s=120)
        assert result.status == "ok", result.cause
        return result.to_dict(), store.commit(config, work)

    return call


@dataclass(frozen=True)
class Collective:
    """A collective's kernel, with the FSDP unit that launched it; times in ns."""

    kind: str
    unit: str
    launched: int
    start: int
    end: int


def last_step(folder: Path) -> tuple[list[Collective], tuple[int, int]]:
    """The collectives of the last traced step as they ran, and the span of its backward in ns."""
    with gzip.open(folder / "trace" / "rank0_trace.json.gz") as file:
        events = json.load(file)["traceEvents"]
    spans = [e for e in events if e.get("cat") == "user_annotation"]
    step = max((e for e in spans if e["name"].startswith("ProfilerStep#")), key=lambda e: e["ts"])
    began, ended = step["ts"], step["ts"] + step["dur"]
    owners = [e for e in spans if e["name"].startswith(("FSDP::all_gather (", "FSDP::reduce_scatter ("))]
    launches = {e["args"]["correlation"]: e for e in events if e.get("cat") == "cuda_runtime"}
    found = []
    for event in events:
        if event.get("cat") != "kernel" or not event["name"].startswith("ncclDevKernel"):
            continue
        launch = launches[event["args"]["correlation"]]["ts"]
        if not began <= launch < ended:
            continue
        owner = min((e for e in owners if e["ts"] <= launch < e["ts"] + e["dur"]), key=lambda e: e["dur"])
        kind, unit = re.fullmatch(r"FSDP::(\w+) \((.+)\)", owner["name"]).groups()  # type: ignore[union-attr]
        times = (launch, event["ts"], event["ts"] + event["dur"])
        found.append(Collective(kind, unit, *(round(1000 * time) for time in times)))
    (backward,) = (e for e in spans if e["name"] == "backward" and began <= e["ts"] < ended)
    span = (round(1000 * backward["ts"]), round(1000 * (backward["ts"] + backward["dur"])))
    return sorted(found, key=lambda c: c.start), span


def in_backward(folder: Path) -> list[Collective]:
    collectives, (began, ended) = last_step(folder)
    return [c for c in collectives if began <= c.launched < ended]


def test_without_backward_prefetch_each_gather_queues_behind_a_reduce_scatter(run: Run) -> None:
    ways = {
        prefetch: run(
            GPT_175B,
            "impl-fsdp1",
            batch=1,
            activation_checkpointing="full",
            backward_prefetch=prefetch,
            reduce_dtype="bf16",
        )
        for prefetch in ("pre", "none")
    }
    times = {prefetch: result["step_time_s"] for prefetch, (result, _) in ways.items()}
    assert times["none"] > 1.08 * times["pre"]
    queued = 0
    run_order = in_backward(ways["none"][1])
    for before, gather in pairwise(run_order):
        if gather.kind != "all_gather" or before.kind != "reduce_scatter":
            continue
        assert int(before.unit.split(".")[1]) == int(gather.unit.split(".")[1]) + 1
        # Launched while the reduce-scatter still ran, and started only when it was over.
        assert gather.launched < before.end <= gather.start
        queued += 1
    assert queued >= 10
    # With prefetch the gather of unit i goes ahead of the reduce-scatter of unit i + 1.
    order = [(c.kind, c.unit) for c in in_backward(ways["pre"][1])]
    for index in range(1, 10):
        gather = order.index(("all_gather", f"blocks.{index}"))
        assert gather < order.index(("reduce_scatter", f"blocks.{index + 1}"))


def test_without_the_limiter_more_memory_is_reserved(run: Run) -> None:
    roomy = {limit: run(GPT_2_8B, "impl-fsdp1", batch=4, limit_all_gathers=limit)[0] for limit in (2, "off")}
    reserved = {limit: result["peak_memory_bytes"]["reserved"] for limit, result in roomy.items()}
    assert reserved["off"] > reserved[2] + 2**30
    assert {result["alloc_retries_per_step"] for result in roomy.values()} == {0}


# In the plain suite: tests/impl/fsdp1/test_flat_simulated.py and tests/sim/device/test_training.py.
@pytest.mark.campaign
def test_without_the_limiter_retries_come(run: Run) -> None:
    tight = {limit: run(GPT_2_8B, "impl-fsdp1", batch=10, limit_all_gathers=limit)[0] for limit in (2, "off")}
    assert tight[2]["alloc_retries_per_step"] == 0
    assert tight["off"]["alloc_retries_per_step"] > 0
    assert tight["off"]["step_time_s"] > tight[2]["step_time_s"]


def test_events_need_no_limiter(run: Run) -> None:
    by_events = run(GPT_2_8B, "impl-fsdp1", batch=4, limit_all_gathers="off", memory_handover="events")[0]
    by_streams = run(GPT_2_8B, "impl-fsdp1", batch=4, limit_all_gathers="off")[0]
    assert by_events["peak_memory_bytes"]["reserved"] < by_streams["peak_memory_bytes"]["reserved"] - 2**30


@pytest.mark.plain_cases("impl-fsdp2")
@pytest.mark.parametrize("system", ["impl-fsdp1", "impl-fsdp2"])
def test_wrapping_the_root_only_overlaps_nothing_in_forward(run: Run, system: str) -> None:
    result, folder = run(SHALLOW, system, wrap="root", batch=2)
    (rank,) = analyze([folder / "trace"]).ranks
    assert rank.phases["forward"].overlapped == 0
    assert rank.phases["forward"].exposed_communication > 0
    blocks, _ = run(SHALLOW, system, wrap="block", batch=2)
    assert blocks["overlap_fraction"] > result["overlap_fraction"]


@pytest.mark.parametrize("system", ["impl-fsdp1", "impl-fsdp2"])
def test_full_shard_puts_half_as_much_again_on_the_wire_as_replication(run: Run, system: str) -> None:
    """Two all-gathers and a reduce-scatter, against a reduce-scatter and an all-gather in one."""
    same = {"batch": 1, "reduce_dtype": "bf16", "wrap": "block"}
    full, full_folder = run(SHALLOW, system, strategy="FULL_SHARD", **same)
    replicated, _ = run(SHALLOW, system, strategy="NO_SHARD", **same)
    assert full["communication"]["all_reduce"]["count"] == 0
    assert replicated["communication"]["all_gather"]["count"] == 0
    sent = {name: full["communication"][name]["wire_bytes"] for name in ("all_gather", "reduce_scatter")}
    # The root is gathered once (it stays unsharded after forward): count its second gather as well.
    (rank,) = analyze([full_folder / "trace"]).ranks
    (root,) = (unit for unit in rank.units if unit.unit == "root")
    root_gather = root.communication["all_gather"].wire_bytes / len(rank.steps)
    ratio = (sum(sent.values()) + root_gather) / replicated["communication"]["all_reduce"]["wire_bytes"]
    assert ratio == pytest.approx(1.5, rel=1e-3)


def test_gathering_less_often_costs_memory(run: Run) -> None:
    full, _ = run(SHALLOW, "impl-fsdp2", batch=4, strategy="FULL_SHARD")
    grad_op, _ = run(SHALLOW, "impl-fsdp2", batch=4, strategy="SHARD_GRAD_OP")
    gathers = full["communication"]["all_gather"]["count"]
    assert grad_op["communication"]["all_gather"]["count"] == (gathers + 1) / 2
    assert grad_op["peak_memory_bytes"]["allocated"] > full["peak_memory_bytes"]["allocated"] + 2**30


@pytest.mark.parametrize(
    "system",
    [
        "impl-fsdp2",
        "impl-fsdp1",
        pytest.param("torch-fsdp2", marks=pytest.mark.campaign),
        pytest.param("torch-fsdp1", marks=pytest.mark.campaign),
    ],
)
def test_offloading_to_the_host_frees_what_is_sharded_and_copies_it_each_step(run: Run, system: str) -> None:
    target, small = {"model": "gpt-125m", "gpus": 8, "shape": "layers=4"}, {"batch": 1, "seq": 256}
    kept, _ = run(target, system, **small)
    offloaded, folder = run(target, system, cpu_offload=True, **small)
    parameters = 4 * 768 * 768 * 12 + 50304 * 768
    freed = kept["peak_memory_bytes"]["allocated"] - offloaded["peak_memory_bytes"]["allocated"]
    assert freed > 12 * parameters / 8 * 0.9  # master weights and AdamW's moments in fp32
    with gzip.open(folder / "trace" / "rank0_trace.json.gz") as file:
        copies = [e for e in json.load(file)["traceEvents"] if e.get("cat") == "gpu_memcpy"]
    steps = 2
    to_device = sum(e["args"]["bytes"] for e in copies if "HtoD" in e["name"])
    assert to_device >= steps * 2 * parameters / 8
