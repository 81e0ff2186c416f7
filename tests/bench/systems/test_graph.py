"""The setting `graph`: a captured step costs the host one launch; what cannot be captured is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsdpbench.base.configuration.config import Config, Measurement
from fsdpbench.base.settings import Settings
from fsdpbench.sweep.planning import not_applicable
from fsdpbench.workloads import get_workload


def result_of(fsdpbench: Any, folder: Path, *words: str) -> dict[str, Any]:
    done = fsdpbench("run", "--model", "gpt-tiny", "--device", "sim", "--json", "-o", str(folder), *words)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


EVENTS = ("--set", "memory_handover=events", "--set", "limit_all_gathers=off")
CAPTURED = {
    "impl-fsdp2": ("--system", "impl-fsdp2"),
    "torch-fsdp2": ("--system", "torch-fsdp2"),
    "impl-fsdp1-events": ("--system", "impl-fsdp1", *EVENTS),
    "impl-fsdp2-offload": ("--system", "impl-fsdp2", "--set", "activation_offload=true"),
    "impl-fsdp2-accumulates": ("--system", "impl-fsdp2", "--set", "grad_accum=2"),
    "impl-fsdp2-hybrid": (
        "--system",
        "impl-fsdp2",
        "--set",
        "strategy=HYBRID_SHARD",
        "--set",
        "shard_size=4",
    ),
}


@pytest.mark.plain_cases("impl-fsdp2")
@pytest.mark.parametrize("case", CAPTURED)
def test_a_step_limited_by_its_host_gets_faster(fsdpbench: Any, tmp_path: Path, case: str) -> None:
    words = ("--gpus", "8", *CAPTURED[case])
    eager = result_of(fsdpbench, tmp_path / "eager", *words)
    graphed = result_of(fsdpbench, tmp_path / "graph", *words, "--set", "graph=step")
    assert graphed["graph"]["captured"]
    assert graphed["graph"]["replays"] >= 2
    assert "estimate" in graphed["graph"]["estimated"]
    assert graphed["step_time_s"] < 0.7 * eager["step_time_s"]
    assert graphed["communication"].keys() == eager["communication"].keys()


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--system", "impl-fsdp1"), "Event.synchronize(), at fsdpbench/impl/runtime/context.py"),
        (("--system", "torch-fsdp1"), "Event.synchronize(), at torch/distributed/fsdp"),
        (("--system", "torch-fsdp1", "--set", "limit_all_gathers=off"), "record_stream"),
    ],
)
def test_what_the_program_does_is_refused_with_its_place(
    fsdpbench: Any, tmp_path: Path, words: tuple[str, ...], told: str
) -> None:
    result = result_of(fsdpbench, tmp_path / "out", "--gpus", "8", *words, "--set", "graph=step")
    assert result["status"] == "error"
    assert "graph=step: " in result["cause"]["message"]
    assert told in result["cause"]["message"]


@pytest.mark.parametrize(
    ("settings", "device", "told"),
    [
        ({}, "cpu", "a what-if of simulated GPUs, not of cpu"),
        ({"compile": True}, "sim", "leave compile out"),
        ({"optimizer": "adamw-loop"}, "sim", "counts its steps on the host"),
        ({"optimizer_dtype": "bf16"}, "sim", "counts its steps on the host"),
        ({"cpu_offload": True}, "sim", "leave cpu_offload out"),
    ],
)
def test_what_is_known_before_is_refused_before(settings: dict[str, Any], device: str, told: str) -> None:
    workload = get_workload("gpt-tiny")
    config = Config(
        model="gpt-tiny",
        shape=dict(workload.shape),
        system="impl-fsdp2",
        device=device,
        hardware="a100-80gb" if device == "sim" else None,
        gpus=8,
        gpus_per_node=8,
        settings=Settings.of(graph="step", **settings).changed(seq=workload.resolve_seq(None)),
        measurement=Measurement.default_for(device),
    )
    assert told in not_applicable(config)["graph"]
