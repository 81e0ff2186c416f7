"""From what was asked to the points that run: lists, systems, and what is not applicable, said once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from fsdpbench.base.errors import UsageError
from fsdpbench.base.settings import Settings
from fsdpbench.cli.requests.request import DEFAULT_GPUS, make_request, request_of_space
from fsdpbench.sweep.hf_model import parse_shape
from fsdpbench.sweep.planning import make_config, not_applicable

SIM = {"model": "gpt-tiny", "gpus": 8, "device": "sim"}


def request(given: dict[str, Any] | None = None, **lists: list[Any]) -> Any:
    return make_request({**SIM, **(given or {})}, lists, whole_space=bool(lists))


def test_the_default_space_changes_one_setting_at_a_time() -> None:
    """Beside each activation checkpointing; DDP is there once, to compare with."""
    plan = request().plan()
    counts = Counter(config.system for config in plan.points)
    assert counts == {"torch-fsdp2": 12, "impl-fsdp2": 12, "torch-ddp": 1}
    usual = Settings.of().to_dict()
    for config in plan.points:
        settings = config.settings.to_dict()
        changed = {name for name, value in settings.items() if value not in (None, usual[name])}
        assert len(changed - {"activation_checkpointing", "seq"}) <= 1, changed
    assert not request({"system": "impl-fsdp2"}).space.references
    named = request({"reference": "torch-ddp"}, wrap=["block", "root"]).plan()
    assert [config.system for config in named.points].count("torch-ddp") == 1
    assert len({(c.system, c.settings) for c in plan.points}) == len(plan.points)
    several = request({"gpus": 16}).plan().points
    assert {config.settings.strategy for config in several} == {"FULL_SHARD", "HYBRID_SHARD"}


def test_a_setting_that_a_system_lacks_is_no_axis_of_it_and_said_once() -> None:
    plan = request({"system": "torch-fsdp2,torch-fsdp1"}, limit_all_gathers=[2, "off"], batch=[1, 2]).plan()
    limits = {(c.system, c.settings.limit_all_gathers) for c in plan.points}
    assert limits == {("torch-fsdp2", None), ("torch-fsdp1", 2), ("torch-fsdp1", "off")}
    assert len(plan.points) == 2 + 4
    said = [note for note in plan.notes if "limit_all_gathers" in note]
    assert len(said) == 1
    assert "torch-fsdp2" in said[0]


def test_a_value_that_a_system_refuses_is_left_out_and_said_once() -> None:
    plan = request({"system": "torch-fsdp2"}, backward_prefetch=["pre", "none"], batch=[1, 2, 3]).plan()
    assert {c.settings.backward_prefetch for c in plan.points} == {"pre"}
    assert len(plan.points) == 3
    assert len([note for note in plan.notes if "backward_prefetch=none" in note]) == 1


def test_run_says_which_given_setting_does_not_apply() -> None:
    target = request().target
    config = make_config(target, "torch-fsdp2", Settings.of(limit_all_gathers=3), target.workload())
    assert set(not_applicable(config, {"limit_all_gathers"})) == {"limit_all_gathers"}
    assert not_applicable(config, {"batch"}) == {}


def test_hybrid_sizes_must_divide_the_ranks() -> None:
    plan = request({"gpus": 16}, strategy=["HYBRID_SHARD"], shard_size=[None, 4, 6]).plan()
    assert sorted({c.settings.shard_size for c in plan.points}, key=str) == [4, None]
    assert any("copies of 6" in note for note in plan.notes)


def test_a_space_written_down_asks_for_the_same_points_again() -> None:
    first = request({"shape": "layers=2,tied=true"}, wrap=["block", "root"], seq=[None, 64])
    second = request_of_space(first.to_space())
    assert [c.to_dict() for c in second.plan().points] == [c.to_dict() for c in first.plan().points]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"model": "gpt-2.9b"}, "gpt-2.8b"),
        ({"hardware": "a100-81gb"}, "a100-80gb"),
        ({"system": "impl-fsdp3"}, "impl-fsdp2"),
        ({"device": "smi"}, "sim"),
        ({"gpus": 0}, "--gpus must be at least 1"),
        ({"gpus": 12}, "does not fill nodes of 8"),
        ({"shape": "layers"}, "name=value"),
        ({"shape": "layerz=2"}, "layers"),
        ({"data": "no/such/file.txt"}, "no/such/file.txt"),
        ({"device": "cpu", "hardware": "a100-80gb"}, "--hardware"),
    ],
)
def test_bad_targets_name_the_way_out(given: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError) as caught:
        request(given).plan()
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_auto_takes_simulated_gpus_where_there_are_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsdpbench.engine.devices.detection.visible_gpus", lambda: 2)
    asked = make_request({"model": "gpt-tiny"}, {}, whole_space=False)
    assert asked.target.device == "sim"
    assert asked.target.gpus == DEFAULT_GPUS
    assert "found 2 of 8 GPUs" in asked.announcement(1)
    assert "A100" in asked.announcement(1)
    enough = make_request({"model": "gpt-tiny", "gpus": 2}, {}, whole_space=False)
    assert enough.target.device == "cuda"


def test_the_network_of_a_node_goes_with_the_profile() -> None:
    given = {"model": "gpt-tiny", "gpus": 16, "device": "sim", "system": "torch-fsdp2", "nic_gb_s": 50.0}
    (point,) = make_request({**given, "hardware": "h100-80gb"}, {}, whole_space=True).plan().points
    assert point.hardware == "h100-80gb+nic-50"
    (point,) = make_request(given, {}, whole_space=True).plan().points
    assert point.hardware == "a100-80gb+nic-50"
    with pytest.raises(UsageError, match="is for simulated GPUs"):
        make_request({**given, "device": "cpu"}, {}, whole_space=True)


def test_software_of_llamas_is_of_llamas_and_may_be_compiled() -> None:
    def refused(model: str, software: str) -> set[str]:
        given = {"model": model, "gpus": 8, "device": "sim", "system": "torch-fsdp1", "software": software}
        target = make_request(given, {}, whole_space=True).target
        settings = Settings.of(compile=True)
        return set(not_applicable(make_config(target, "torch-fsdp1", settings, target.workload())) or {})

    assert refused("llama-tiny", "fms-fsdp-2024") == set()
    assert refused("gpt-tiny", "fms-fsdp-2024") == {"model"}
    assert refused("gpt-tiny", "fsdp1-2022") == {"compile"}


def test_shapes_are_typed() -> None:
    assert parse_shape("layers=2,tied=true,ratio=0.5,kind=x") == {
        "layers": 2, "tied": True, "ratio": 0.5, "kind": "x",
    }  # fmt: skip


def test_what_really_takes_memory_of_this_machine_must_fit_it() -> None:
    """Offloaded shards and states do not; gradients that are added up on the host do."""
    made = request({"model": "gpt-30b", "gpus": 8}, cpu_offload=[True])
    assert {config.system for config in made.plan().points} == {"torch-fsdp2", "impl-fsdp2"}
    accumulated = {"cpu_offload": [True], "grad_accum": [2], "grad_sync": ["every"]}
    too_much = request({"model": "gpt-30b", "gpus": 8}, **accumulated).plan()
    assert not too_much.points
    assert any("14 GiB" in note for note in too_much.notes)
    assert request({"model": "gpt-30b", "gpus": 16}, **accumulated).plan().points


@pytest.mark.parametrize("wrap", ["T5Block", "block+head", "block+blocks", "blocks.12"])
def test_a_wrap_of_what_the_model_lacks_is_refused_before_anything_runs(wrap: str) -> None:
    known = ["GPTAttention+GPTFeedForward", "block+lm_head", "blocks.0", "block+blocks.0.attention"]
    assert len(request(wrap=known).plan().points) > len(known)
    with pytest.raises(UsageError, match=r"no module of class '.*', nor .* has GPTAttention, GPTBlock,"):
        request(wrap=["block", wrap]).plan()


@pytest.mark.parametrize(
    ("system", "settings", "refused"),
    [
        ("torch-fsdp1", {"lora": 8}, {"lora"}),
        ("impl-fsdp1", {"lora": 8}, {"lora"}),
        ("impl-fsdp1", {"lora": 8, "param_dtype": "fp32", "reduce_dtype": "fp32"}, set()),
        ("torch-fsdp2", {"lora": 8}, set()),
        ("impl-fsdp2", {"lora": 8, "lora_targets": "attention"}, set()),
        ("torch-ddp", {"lora": 8}, set()),
        ("torch-fsdp2", {"lora": 8, "lora_base": "4bit"}, set()),
        ("impl-fsdp2", {"lora": 8, "lora_base": "4bit"}, set()),
        ("impl-fsdp1", {"lora": 8, "lora_base": "4bit", "param_dtype": "fp32"}, {"lora_base"}),
        ("torch-fsdp2", {"lora_base": "4bit"}, {"lora_base"}),
        ("impl-fsdp2", {"lora_targets": "attention"}, {"lora_targets"}),
        ("single", {"lora_targets": "attention"}, {"gpus", "lora_targets"}),
    ],
)
def test_where_adapters_apply(system: str, settings: dict[str, Any], refused: set[str]) -> None:
    target = request({"model": "decoder-tiny"}).target
    config = make_config(target, system, Settings.of(**settings), target.workload())
    assert set(not_applicable(config)) == refused


def test_layers_that_a_model_lacks_get_no_adapters_and_that_is_said_before_anything_runs() -> None:
    target = request({"model": "decoder-tiny"}).target
    with pytest.raises(UsageError, match="no layer 'qkv'; it has down"):
        make_config(target, "impl-fsdp2", Settings.of(lora=4, lora_targets="qkv"), target.workload())
