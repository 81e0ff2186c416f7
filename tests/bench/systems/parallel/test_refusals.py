"""Parallelism that cannot be is refused by name, with the way out; what can be is priced as shares."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fsdpbench.base.configuration.config import Config, Degrees, Measurement
from fsdpbench.base.settings import Settings
from fsdpbench.sweep.planning import make_config, make_target, not_applicable, without_absent
from fsdpbench.sweep.prediction import state_bytes


def configured(
    model: str,
    system: str = "torch-fsdp2",
    shape: Any = None,
    device: str = "sim",
    gpus: int = 16,
    **settings: Any,
) -> Config:
    target = make_target(
        model=model,
        shape=shape or {},
        device=device,
        hardware="h100-80gb",
        gpus=gpus,
        gpus_per_node=None,
        data=None,
        measurement=Measurement(1, 1, 0, timeout_s=60.0),
    )
    return without_absent(make_config(target, system, Settings.of(**settings), target.workload()))


@pytest.mark.parametrize(
    ("model", "settings", "setting", "told"),
    [
        ("llama3-8b", {"tp": 3}, "tp", "16 ranks cannot be divided into groups of 3"),
        ("llama3-8b", {"tp": 16}, "tp", "kv_heads=8, which 16 ranks cannot share evenly: use 2 or 4 or 8"),
        ("llama3-8b", {"tp": 8, "seq": 100}, "tp", "100 tokens cannot be shared by 8 ranks"),
        ("llama3-8b", {"tp": 2, "system": "torch-fsdp1"}, "tp", "tp is for impl-fsdp2 and torch-fsdp2"),
        ("llama3-8b", {"tp": 2, "system": "torch-ddp"}, "tp", "tp is for impl-fsdp2 and torch-fsdp2"),
        ("llama3-8b", {"tp": 2, "lora": 8, "lora_base": "4bit"}, "tp", "4 bits cannot be cut"),
        ("mixtral-8x7b", {"ep": 2, "lora": 8}, "ep", "adapters are beside tp and cp alone"),
        ("llama3-8b", {"tp": 8, "cp": 4}, "cp", "16 ranks cannot be divided into groups of 4 x 8 (cp x tp)"),
        ("llama3-8b", {"tp": 2, "compile": True}, "tp", "leave compile out"),
        ("llama3-8b", {"tp": 2, "cpu_offload": True}, "tp", "leave cpu_offload out"),
        ("t5-base", {"tp": 8}, "tp", "heads=12, which 8 ranks cannot share evenly: use 2 or 4"),
        ("regnet-9b", {"tp": 2}, "tp", "the family regnet has no plan"),
        ("llama3-8b", {"ep": 2}, "ep", "llama3-8b has no experts"),
        ("mixtral-8x7b", {"ep": 16}, "ep", "8 experts cannot be shared evenly by 16 ranks"),
        ("mixtral-8x7b", {"ep": 8, "strategy": "HYBRID_SHARD", "shard_size": 4}, "ep", "do not divide the 4"),
        ("mixtral-8x7b", {"ep": 2, "reshard_after_forward": 4}, "ep", "true or false"),
        ("llama3-8b", {"cp": 2, "device": "cuda"}, "cp", "never run on a GPU: simulate it"),
        ("gpt-tiny", {"cp": 2, "seq": 64, "shape": {"dropout": 0.1}}, "cp", "drops nothing"),
        ("llama3-8b", {"cp": 2, "tp": 8, "seq": 248}, "tp", "248 tokens cannot be shared by 16 ranks"),
        ("llama3-8b", {"cp": 2, "param_dtype": "fp32"}, "cp", "param_dtype=bf16 or fp16"),
        ("llama3-8b", {"cp": 4, "seq": 100}, "cp", "100 tokens does not divide into 2 x 4 parts"),
        ("gemma3-27b", {"cp": 2}, "cp", "attention with a mask"),
        ("t5-3b", {"cp": 2}, "cp", "not causal throughout"),
        ("llama3-8b", {"cp": 2, "system": "torch-fsdp1"}, "cp", "cp is for impl-fsdp2 and torch-fsdp2"),
        ("mixtral-8x7b", {"ep": 4, "system": "impl-fsdp1"}, "ep", "ep is for impl-fsdp2 and torch-fsdp2"),
    ],
)
def test_what_cannot_be_is_named(model: str, settings: dict[str, Any], setting: str, told: str) -> None:
    refused = not_applicable(configured(model, **settings))
    assert told in refused[setting]


@pytest.mark.parametrize("gpus", [1, 2, 3])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "HYBRID_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("asked", [{"tp": 4}, {"cp": 4}, {"ep": 4}, {"tp": 2, "cp": 2}, {"tp": 2, "ep": 4}])
def test_groups_of_more_ranks_than_there_are_are_refused(
    gpus: int, strategy: str, asked: dict[str, int]
) -> None:
    for system in ("torch-fsdp2", "impl-fsdp2", "torch-fsdp1", "single"):
        config = configured("mixtral-8x7b", system, gpus=gpus, strategy=strategy, **asked)
        assert not_applicable(config).keys() & {"tp", "cp", "ep", "gpus"}, (system, config.settings)


@pytest.mark.parametrize("system", ["torch-fsdp2", "impl-fsdp2"])
@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("llama3-8b", {"tp": 8}),
        ("gpt-2.8b", {"tp": 2, "strategy": "HYBRID_SHARD"}),
        ("gemma3-27b", {"tp": 4}),
        ("mixtral-8x7b", {"ep": 8}),
        ("llama3-8b", {"cp": 4, "seq": 32768}),
        ("llama3-8b", {"cp": 2, "tp": 8, "seq": 32768}),
        ("mixtral-8x7b", {"tp": 2, "ep": 2, "cp": 2}),
        ("mixtral-8x7b", {"ep": 8, "cp": 4}),
        ("t5-3b", {"tp": 8}),
        ("qwen3-30b-a3b", {"ep": 16}),
        ("qwen3-30b-a3b", {"ep": 16, "tp": 4}),
        ("gpt-oss-20b", {"tp": 8}),
        ("mixtral-8x7b", {"ep": 8, "tp": 2, "strategy": "HYBRID_SHARD"}),
        ("llama3-8b", {"tp": 2, "lora": 16}),
        ("llama3-8b", {"cp": 2, "device": "cpu", "param_dtype": "fp32"}),
    ],
)
def test_what_can_be_is_not_refused(system: str, model: str, settings: dict[str, Any]) -> None:
    refused = not_applicable(configured(model, system, **settings))
    one_mesh = torch.__version__ < "2.12" and system == "torch-fsdp2" and "ep" in settings
    assert list(refused) == ["ep"] * one_mesh


def test_training_state_is_shared_by_all_ranks_of_a_copy() -> None:
    alone = state_bytes(configured("llama3-8b"))
    assert state_bytes(configured("llama3-8b", tp=4)) == alone
    in_nodes = {"strategy": "HYBRID_SHARD"}  # a copy a node, whichever way its GPUs share it
    assert state_bytes(configured("llama3-8b", tp=4, **in_nodes)) == 2 * (alone or 0)


def test_a_batch_is_of_a_group_of_ranks() -> None:
    degrees = Degrees(16, tp=4, cp=2)
    assert (degrees.group, degrees.data, degrees.sharding) == (8, 2, 4)
    assert [degrees.data_rank(rank) for rank in (0, 7, 8, 15)] == [0, 0, 1, 1]
