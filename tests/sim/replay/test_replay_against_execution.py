"""Steps that are done again leave the log that executing them leaves: actions, addresses, sizes, times."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsdpbench.base.configuration.config import Config, JitterSettings
from fsdpbench.base.configuration.lengths import LengthSettings
from fsdpbench.base.configuration.soak import SoakSettings
from fsdpbench.base.settings import Settings
from fsdpbench.engine.devices.base import Placement
from fsdpbench.engine.measuring.soak import Soak
from fsdpbench.engine.worker import run_rank
from fsdpbench.sim.model.allocator import AllocatorEvent
from fsdpbench.sim.model.allocator.types import AllocatorAction
from fsdpbench.sim.torch_device.accelerator import ACCELERATOR
from fsdpbench.sweep.planning import make_config, make_target, without_absent

pytestmark = pytest.mark.simulated

BUCKETS = "lognormal:20,0.2,buckets=4"


def soak_config(
    system: str,
    soak: SoakSettings,
    *,
    model: str = "gpt-tiny",
    gpus: int = 8,
    hardware: str = "a100-80gb",
    **settings: Any,
) -> Config:
    target = make_target(
        model=model, shape={}, device="sim", hardware=hardware, gpus=gpus, gpus_per_node=None, data=None
    )
    config = without_absent(make_config(target, system, Settings.of(**settings), target.workload()))
    measurement = replace(config.measurement, warmup_steps=0, traced_steps=0)
    return replace(config, soak=soak, measurement=measurement)


@contextmanager
def listening(log: list[AllocatorEvent]) -> Iterator[None]:
    """From the first step to the last: what is freed when the program ends is no part of a soak."""
    run = Soak.run

    def listened(self: Soak, *args: Any) -> list[float]:
        ACCELERATOR.listen(log.append)
        try:
            return run(self, *args)
        finally:
            ACCELERATOR.stop_listening()

    Soak.run = listened  # type: ignore[method-assign]
    try:
        yield
    finally:
        Soak.run = run  # type: ignore[method-assign]


def ran(config: Config) -> tuple[dict[str, Any], list[AllocatorEvent]]:
    """The rank's record and what the allocator did in the soak."""
    log: list[AllocatorEvent] = []
    with tempfile.TemporaryDirectory() as folder, listening(log):
        run_rank(config, Placement(0, config.gpus, 0), Path(folder))
        return json.loads((Path(folder) / "trace" / "rank0_record.json").read_text()), log


def compare(config: Config) -> tuple[dict[str, Any], list[AllocatorEvent]]:
    """The same soak with and without replay: one log. The former's record and the log."""
    assert config.soak is not None
    record, log = ran(config)
    executed, full = ran(replace(config, soak=replace(config.soak, replay=False)))
    assert executed["soak"]["replayed"] == 0
    assert log == full
    assert record["soak"]["over_steps"] == executed["soak"]["over_steps"]
    assert (record["status"], record["cause"]) == (executed["status"], executed["cause"])
    return record, log


@pytest.mark.plain_cases("impl-fsdp2")
@pytest.mark.parametrize(
    "system", ["impl-fsdp2", "torch-fsdp2", "impl-fsdp1", "torch-fsdp1", "torch-ddp", "single"]
)
def test_the_allocators_log_is_that_of_executed_steps(system: str) -> None:
    soak = SoakSettings(28, LengthSettings.parse(BUCKETS), eval_every=14, eval_steps=1)
    record, _ = compare(soak_config(system, soak, gpus=1 if system == "single" else 8, seq=64))
    assert record["soak"]["replayed"] > 8


@pytest.mark.campaign
@pytest.mark.parametrize("system", ["impl-fsdp2", "torch-fsdp2", "impl-fsdp1", "torch-fsdp1"])
def test_fifty_steps_of_a_large_model(system: str) -> None:
    soak = SoakSettings(50, LengthSettings.parse("lognormal:900,0.6,buckets=16"), eval_every=20, eval_steps=2)
    record, _ = compare(soak_config(system, soak, model="gpt-2.8b", seq=2048, batch=5))
    assert record["soak"]["replayed"] > 10


@pytest.mark.campaign
@pytest.mark.parametrize("varied", [False, True], ids=["equal", "near the limit"])
@pytest.mark.parametrize(
    ("system", "batch", "seq"),
    [("impl-fsdp2", 5, 2048), ("torch-fsdp2", 5, 2048), ("impl-fsdp1", 4, 2432), ("torch-fsdp1", 4, 2432)],
)
def test_replayed_steps_retry_as_executed_ones_do(system: str, batch: int, seq: int, varied: bool) -> None:
    """The GPU is all but full: the allocator gives its cache back in steps that are replayed too."""
    lengths = LengthSettings.parse(f"lognormal:{0.97 * seq},0.02,multiple=32") if varied else None
    soak = SoakSettings(30, lengths)
    record, log = compare(
        soak_config(system, soak, model="gpt-2.8b", hardware="a100-40gb", seq=seq, batch=batch)
    )
    retried = [count for count in record["soak"]["over_steps"]["alloc_retries"] if count]
    assert any(event.action is AllocatorAction.RETRY for event in log)
    assert len(retried) > record["soak"]["executed"]


@pytest.mark.campaign
@pytest.mark.parametrize(
    "settings",
    [
        {"grad_accum": 2},
        {"cpu_offload": True},
        {"strategy": "HYBRID_SHARD", "shard_size": 4},
        {"strategy": "NO_SHARD"},
        {"reshard_after_forward": False},
        {"activation_checkpointing": "full"},
        {"zero_grad": "fill"},
    ],
    ids=str,
)
@pytest.mark.parametrize("system", ["impl-fsdp2", "torch-fsdp2", "torch-fsdp1"])
def test_settings_replay_as_they_execute(system: str, settings: dict[str, Any]) -> None:
    soak = SoakSettings(60, LengthSettings.parse("lognormal:40,0.2,buckets=2"), eval_every=11, eval_steps=1)
    config = soak_config(system, soak, seq=64, **settings)
    ran(replace(config, soak=SoakSettings(1)))  # DTensor synchronises its generators once a process
    record, _ = compare(config)
    if (system, settings) == ("impl-fsdp2", {"cpu_offload": True}):  # it asks whether a copy is done
        assert record["soak"]["replayed"] == 0
        assert any("how far the device is" in why for why in record["soak"]["executed_because"])
    else:
        assert record["soak"]["replayed"]


def test_memory_runs_out_in_a_replayed_step_as_in_an_executed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else takes the GPU's memory after the fifth step."""
    note = Soak._note

    def taken(self: Soak, *args: Any) -> None:
        note(self, *args)
        if self.record["steps_done"] == 5:
            ACCELERATOR.allocator.empty_cache()
            device = ACCELERATOR.allocator.device
            device.capacity_bytes = device.used_bytes + (4 << 20)

    monkeypatch.setattr(Soak, "_note", taken)
    record, log = compare(soak_config("impl-fsdp2", SoakSettings(8), seq=64))
    assert (record["status"], record["soak"]["out_of_memory_step"]) == ("oom", 6)
    assert (record["soak"]["executed"], record["soak"]["replayed"]) == (4, 1)  # and the sixth, half
    assert log[-1].action is AllocatorAction.OOM


@pytest.mark.campaign
def test_jitter_is_drawn_anew_and_nothing_is_replayed() -> None:
    soak = SoakSettings(4, eval_every=2, eval_steps=1)
    record, _ = ran(replace(soak_config("impl-fsdp2", soak, seq=64), jitter=JitterSettings(seed=1)))
    assert record["soak"]["replayed"] == 0
    assert record["soak"]["executed_because"] == {"jitter draws again for every kernel and collective": 6}
