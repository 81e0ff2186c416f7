"""A soak on simulated GPUs: every step with its tokens, time and memory, and the step without room."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsdpbench.base.configuration.config import Config
from fsdpbench.base.configuration.soak import LengthSettings, SoakSettings
from fsdpbench.base.settings import Settings
from fsdpbench.engine.devices.base import Placement
from fsdpbench.engine.measuring.soak import Soak, shapes_of
from fsdpbench.engine.worker import run_rank
from fsdpbench.sim.torch_device.accelerator import ACCELERATOR
from fsdpbench.sweep.planning import make_config, make_target, without_absent

pytestmark = pytest.mark.simulated

SYSTEMS = ["impl-fsdp2", "torch-fsdp2", "impl-fsdp1", "torch-fsdp1", "torch-ddp", "single"]


def soak_config(system: str, soak: SoakSettings) -> Config:
    gpus = 1 if system == "single" else 8
    target = make_target(
        model="gpt-tiny",
        shape={},
        device="sim",
        hardware="a100-80gb",
        gpus=gpus,
        gpus_per_node=None,
        data=None,
    )
    config = without_absent(make_config(target, system, Settings.of(seq=64), target.workload()))
    measurement = replace(config.measurement, warmup_steps=0, traced_steps=0)
    return replace(config, soak=soak, measurement=measurement)


def ran(config: Config, folder: Path) -> dict[str, Any]:
    """The rank's record."""
    run_rank(config, Placement(0, config.gpus, 0), folder)
    record: dict[str, Any] = json.loads((folder / "trace" / "rank0_record.json").read_text())
    return record


@pytest.mark.plain_cases("impl-fsdp2")
@pytest.mark.parametrize("system", SYSTEMS)
def test_each_step_has_its_tokens_time_and_memory(system: str, tmp_path: Path) -> None:
    lengths = LengthSettings.parse("lognormal:20,0.2,buckets=4")
    config = soak_config(system, SoakSettings(28, lengths, eval_every=14, eval_steps=2))
    shapes = shapes_of(config)
    record = ran(config, tmp_path)
    assert record["status"] == "ok", record["cause"]
    soak, over = record["soak"], record["soak"]["over_steps"]
    assert (soak["steps_done"], soak["out_of_memory_step"]) == (28, None)
    assert soak["distinct_shapes"] == len(set(shapes))
    assert over["tokens"] == [shape.tokens for shape in shapes]
    assert over["evaluates"] == [shape.evaluates for shape in shapes]
    assert {len(column) for column in over.values()} == {32}
    trained = [seconds for seconds, shape in zip(over["seconds"], shapes, strict=True) if not shape.evaluates]
    assert record["step_times_s"] == trained
    assert max(s for s, evaluates in zip(over["seconds"], over["evaluates"], strict=True) if evaluates) < min(
        trained
    )


def test_a_soak_ends_in_the_step_without_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Another process takes the GPU's memory after the fifth step."""
    note = Soak._note

    def taken(self: Soak, *args: Any) -> None:
        note(self, *args)
        if self.record["steps_done"] == 5:
            ACCELERATOR.allocator.empty_cache()
            device = ACCELERATOR.allocator.device
            device.capacity_bytes = device.used_bytes + (4 << 20)

    monkeypatch.setattr(Soak, "_note", taken)
    record = ran(soak_config("impl-fsdp2", SoakSettings(8)), tmp_path)
    soak = record["soak"]
    assert (record["status"], soak["steps_done"], soak["out_of_memory_step"]) == ("oom", 5, 6)
    assert len(soak["over_steps"]["seconds"]) == 5
