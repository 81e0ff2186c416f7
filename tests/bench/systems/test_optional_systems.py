"""DeepSpeed's ZeRO-3 and Megatron-FSDP: how settings become theirs, what is said where they cannot run."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from fsdpbench.base.configuration.config import PARALLEL, Config, Measurement
from fsdpbench.base.errors import UsageError
from fsdpbench.base.settings import SETTINGS, Settings
from fsdpbench.cli.commands.sweep import command as sweep
from fsdpbench.sweep.planning import without_absent
from fsdpbench.systems import System, get_system
from fsdpbench.systems.deepspeed_zero3 import zero3_config
from fsdpbench.systems.megatron_fsdp import megatron_arguments, megatron_precision

BOTH = ("deepspeed-zero3", "megatron-fsdp")


def config(system: str, device: str = "cuda", **settings: Any) -> Config:
    return Config(
        model="gpt-2.8b", shape={}, system=system, device=device, hardware=None, gpus=16, gpus_per_node=8,
        settings=Settings.of(**settings), measurement=Measurement.default_for("cuda"),
    )  # fmt: skip


def test_zero3s_document() -> None:
    written = zero3_config(config("deepspeed-zero3", batch=4, grad_accum=2))
    assert written["train_micro_batch_size_per_gpu"] == 4
    assert written["gradient_accumulation_steps"] == 2
    assert written["zero_optimization"]["stage"] == 3
    assert written["bf16"] == {"enabled": True}
    assert written["fp16"]["enabled"] is False
    assert written["communication_data_type"] == "fp32"
    assert json.loads(json.dumps(written)) == written
    half = zero3_config(config("deepspeed-zero3", param_dtype="fp16", reduce_dtype="fp16", cpu_offload=True))
    assert half["fp16"] == {"enabled": True, "loss_scale": 1.0}
    assert half["communication_data_type"] == "fp16"
    assert half["zero_optimization"]["offload_param"]["device"] == "cpu"
    assert half["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    plain = zero3_config(config("deepspeed-zero3", param_dtype="fp32"))
    assert not plain["bf16"]["enabled"]
    assert not plain["fp16"]["enabled"]


@pytest.mark.parametrize(
    ("strategy", "inner", "outer"),
    [
        ("FULL_SHARD", "optim_grads_params", None),
        ("SHARD_GRAD_OP", "optim_grads", None),
        ("NO_SHARD", "no_shard", None),
        ("HYBRID_SHARD", "optim_grads_params", "replicate"),
        ("_HYBRID_SHARD_ZERO2", "optim_grads", "replicate"),
    ],
)
def test_megatrons_arguments(strategy: str, inner: str, outer: str | None) -> None:
    asked = config("megatron-fsdp", strategy=strategy, reduce_dtype="bf16")
    written = megatron_arguments(asked)
    assert written["zero_dp_strategy"] == inner
    assert written["dp_outer_dim"] == outer
    assert megatron_precision(asked.settings) == {
        "main_params_dtype": torch.float32,
        "main_grads_dtype": torch.float32,
        "grad_comm_dtype": torch.bfloat16,
    }


@pytest.mark.parametrize(
    ("system", "settings", "refused"),
    [
        ("deepspeed-zero3", {"strategy": "HYBRID_SHARD"}, "strategy"),
        ("deepspeed-zero3", {"grad_accum": 2, "grad_sync": "last"}, "grad_sync"),
        ("deepspeed-zero3", {"compile": True}, "compile"),
        ("megatron-fsdp", {"wrap": "root"}, "wrap"),
        ("megatron-fsdp", {"wrap": "size:1000"}, "wrap"),
        ("megatron-fsdp", {"grad_accum": 2, "grad_sync": "last"}, "grad_sync"),
        ("megatron-fsdp", {"strategy": "FULL_SHARD", "shard_size": 8}, "shard_size"),
    ],
)
def test_what_they_cannot_do_is_refused_with_a_reason(
    system: str, settings: dict[str, Any], refused: str
) -> None:
    found = get_system(system).not_applicable(config(system, **settings))
    assert list(found) == [refused]
    assert len(found[refused]) > 20


@pytest.mark.parametrize("name", BOTH)
def test_every_setting_is_mapped_refused_or_absent(name: str) -> None:
    """Nothing is silently ignored: what the mapping does not read must be absent, or the bench's own."""
    system = get_system(name)
    bench_own = {"seq", "batch", "grad_accum", "grad_sync", "activation_checkpointing", "optimizer", "seed"}
    bench_own |= {"attention", "implementation", "checkpoint_first", "norm", "rotary", "loss"}
    mapped = {"param_dtype", "reduce_dtype", "strategy", "shard_size", "compile"}
    mapped |= {"cpu_offload"} if name == "deepspeed-zero3" else {"wrap", "zero_grad"}
    absent = set(system.absent_settings(config(name)))
    others = {**dict.fromkeys(PARALLEL, 2), "graph": "step", "compile_loss": True}
    refused = {
        each for each, value in others.items() if each in system.not_applicable(config(name, **{each: value}))
    }
    assert absent | mapped | bench_own | refused == set(SETTINGS)
    assert not absent & mapped
    assert system.not_applicable(without_absent(config(name))) == {}


@pytest.mark.parametrize("name", BOTH)
def test_devices_and_missing_packages_are_said(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    system = get_system(name)
    devices = ", ".join(sorted(system.devices))
    for device in {"cpu", "sim"} - system.devices:
        assert system.not_applicable(config(name, device)) == {
            "device": f"it runs on {devices}, not on {device}"
        }
    monkeypatch.setattr(System, "is_installed", property(lambda self: self.package is None))
    with pytest.raises(UsageError, match=r"pip install 'fsdpbench\[") as caught:
        system.require()
    assert name in str(caught.value)
    words = ["--model", "gpt-tiny", "--gpus", "2", "--device", "cpu", "--system", f"torch-ddp,{name}"]
    done = CliRunner().invoke(sweep, words)
    assert "is not installed" in str(done.exception)
