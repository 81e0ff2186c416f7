"""The setting `symmetric_memory`: what it gains where there are copy engines, refusals by name elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdpbench.base.configuration.config import Config, Measurement
from fsdpbench.base.settings import Settings
from fsdpbench.sweep.planning import not_applicable
from fsdpbench.workloads import get_workload


@pytest.mark.campaign
@pytest.mark.parametrize("hardware", ["gb200", "h100-80gb"])
@pytest.mark.parametrize("system", ["impl-fsdp2", "torch-fsdp2"])
def test_it_costs_little_memory_and_gains_what_was_measured(
    fsdpbench: Any, tmp_path: Path, system: str, hardware: str
) -> None:
    words = ["run", "--device", "sim", "--hardware", hardware, "--gpus", "4", "--gpus-per-node", "4"]
    words += ["--system", system, "--model", "gpt-2.8b", "--batch", "2", "--json"]
    found: dict[str, dict[str, Any]] = {}
    for value in ("false", "true"):
        out = ("--set", f"symmetric_memory={value}", "-o", str(tmp_path / value))
        found[value] = fsdpbench.json(*words, *out)
    gain = found["false"]["step_time_s"] / found["true"]["step_time_s"]
    assert 0.99 < gain < 1.07  # +1 to +6 % was measured; ours has no copies to lose without it
    peaks = [found[value]["peak_memory_bytes"]["allocated"] for value in ("false", "true")]
    assert peaks[1] < 1.03 * peaks[0]


@pytest.mark.parametrize(
    ("system", "settings", "where", "told"),
    [
        ("impl-fsdp2", {}, {"hardware": "a100-80gb"}, "no source has figures"),
        ("torch-fsdp2", {}, {"gpus": 16}, "HYBRID_SHARD"),
        ("torch-fsdp2", {"strategy": "NO_SHARD"}, {}, "nothing is gathered"),
        ("impl-fsdp2", {"tp": 2}, {}, "leave tp at 1"),
        ("impl-fsdp2", {"layout": "grouped"}, {}, "leave layout out"),
        ("impl-fsdp2", {}, {"device": "cpu", "hardware": None}, "it is NCCL's"),
        ("impl-fsdp2", {}, {"device": "cuda", "hardware": None}, "NCCL_CTA_POLICY=2 in the environment"),
        ("torch-fsdp1", {}, {}, "use FSDP2"),
        ("torch-ddp", {}, {}, ""),
    ],
)
def test_what_it_does_not_go_with_is_refused_by_name(
    system: str,
    settings: dict[str, Any],
    where: dict[str, Any],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NCCL_CTA_POLICY", raising=False)
    workload = get_workload("gpt-tiny")
    target = {"device": "sim", "hardware": "h100-80gb", "gpus": 8} | where
    config = Config(
        model="gpt-tiny",
        shape=dict(workload.shape),
        system=system,
        gpus_per_node=8,
        settings=Settings.of(symmetric_memory=True, **settings).changed(seq=workload.resolve_seq(None)),
        measurement=Measurement.default_for("sim"),
        **target,
    )
    assert told in not_applicable(config, ["symmetric_memory"])["symmetric_memory"]
