"""A `Config`: its name, its key, its way through JSON, and the world sizes it refuses."""

from __future__ import annotations

import dataclasses
import json

import pytest

from fsdpbench.base.configuration.config import Config, Measurement, check_world
from fsdpbench.base.errors import UsageError
from fsdpbench.base.settings import SETTINGS, Settings
from fsdpbench.cli.requests.request import target_of
from fsdpbench.engine.results.provenance import content_key

CONFIG = Config(
    model="gpt-tiny",
    shape={"layers": 4},
    shape_given={},
    system="impl-fsdp1",
    device="sim",
    hardware="a100-80gb",
    gpus=16,
    gpus_per_node=8,
    settings=Settings.of(wrap="size:1e6", limit_all_gathers="off"),
    measurement=Measurement.default_for("sim"),
)


def test_survives_json() -> None:
    assert Config.from_dict(json.loads(json.dumps(CONFIG.to_dict()))) == CONFIG


def test_a_record_of_earlier_versions_is_read_and_its_key_is_kept() -> None:
    """Records held `emulate`, which keys, samples and names of folders were hashed from."""
    record = {**CONFIG.to_dict(), "emulate": False}
    assert "emulate" not in CONFIG.to_dict()
    assert Config.from_dict(record) == CONFIG
    assert CONFIG.identity() == record
    with pytest.raises(UsageError, match=r"calibrate -o mine\.toml"):
        Config.from_dict({**record, "emulate": True})


@pytest.mark.parametrize("device", ["cpu", "sim", "cuda"])
def test_emulation_is_refused_with_its_replacement(device: str) -> None:
    given = {"model": "gpt-tiny", "device": device, "gpus": 8}
    with pytest.raises(UsageError, match=r"--hardware mine\.toml"):
        target_of({**given, "emulate": True})
    if device != "cuda":
        assert target_of({**given, "emulate": False})[0].gpus == 8


def test_the_name_is_safe_for_a_file_system() -> None:
    assert CONFIG.name == "impl-fsdp1-16x-size1000000-bwd-pre-lim-off-bf16"


OTHER = {
    "batch": 3, "grad_accum": 2, "grad_sync": "last", "strategy": "NO_SHARD", "shard_size": 4, "wrap": "root",
    "reshard_after_forward": False, "backward_prefetch": "none", "backward_prefetch_depth": 2,
    "forward_prefetch": 1, "limit_all_gathers": 3, "memory_handover": "events", "param_dtype": "fp32",
    "layout": "packed",
    "reduce_dtype": "bf16", "buffer_dtype": "bf16", "activation_checkpointing": "full", "cpu_offload": True,
    "optimizer": "sgd", "zero_grad": "fill", "compile": True, "compile_loss": True, "seed": 1, "seq": 128,
    "lora": 8, "lora_targets": "attention", "lora_base": "4bit", "implementation": "transformers",
    "keep_last_unsharded": True, "optimizer_dtype": "bf16", "linear_dtype": "fp8", "tp": 2, "cp": 2, "ep": 2,
    "checkpoint_first": 2, "clip": 1.0, "norm": "composed", "rotary": "complex", "loss": "fused",
    "activation_offload": True, "graph": "step", "symmetric_memory": True, "attention": "math",
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_changes_the_key(name: str) -> None:
    changed = dataclasses.replace(CONFIG, settings=CONFIG.settings.changed(**{name: OTHER[name]}))
    assert content_key(changed) != content_key(CONFIG)


@pytest.mark.parametrize(
    "change", [{"hardware": "h100-80gb"}, {"gpus": 8}, {"system": "impl-fsdp2"}, {"model": "gpt-125m"}]
)
def test_the_place_changes_the_key(change: dict[str, object]) -> None:
    assert content_key(dataclasses.replace(CONFIG, **change)) != content_key(CONFIG)


@pytest.mark.parametrize(("gpus", "per_node"), [(0, 8), (-1, 8), (12, 8), (8, 0)])
def test_a_world_that_does_not_fit_is_refused(gpus: int, per_node: int) -> None:
    with pytest.raises(UsageError, match="--gpus"):
        check_world(gpus, per_node)


def test_whole_nodes_and_part_of_one_fit() -> None:
    for gpus, per_node in ((1, 8), (4, 8), (8, 8), (24, 8)):
        check_world(gpus, per_node)


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(UsageError, match="tpu"):
        dataclasses.replace(CONFIG, device="tpu")


def test_long_names_stay_apart_where_they_are_cut() -> None:
    many = {
        "strategy": "HYBRID_SHARD", "shard_size": 4, "grad_accum": 8, "grad_sync": "last",
        "memory_handover": "record_stream", "reduce_dtype": "bf16", "buffer_dtype": "bf16",
        "activation_checkpointing": "full", "optimizer": "adamw-foreach",
    }  # fmt: skip
    alike = [
        dataclasses.replace(CONFIG, settings=CONFIG.settings.changed(**many, zero_grad="fill", seed=seed))
        for seed in range(20)
    ]
    names = {each.name for each in alike}
    assert len(names) == 20
    assert max(map(len, names)) <= 120
    assert alike[0].name == dataclasses.replace(alike[0]).name
