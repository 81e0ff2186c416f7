"""`linear_dtype`: what is gathered, what runs, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdpbench.base.settings import Settings
from fsdpbench.cli.requests.request import make_request
from fsdpbench.sweep.planning import make_config, not_applicable
from fsdpbench.systems.registry import get_system

SIM = ("--model", "llama-tiny", "--device", "sim", "--gpus", "8")


def result_of(fsdpbench: Any, folder: Path, *words: str) -> dict[str, Any]:
    result: dict[str, Any] = fsdpbench.json("run", "--json", "-o", str(folder), *words)
    return result


def set_to(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def gathered(result: dict[str, Any]) -> int:
    return int(result["communication"]["all_gather"]["bytes"])


@pytest.mark.plain_cases("impl-fsdp2")
@pytest.mark.parametrize("system", ["impl-fsdp2", "torch-fsdp2"])
def test_large_weights_are_gathered_in_half_the_bytes(fsdpbench: Any, tmp_path: Path, system: str) -> None:
    """Twice a step in two blocks: weights of the linear layers, each a byte instead of two."""
    shape = ("--shape", "layers=2,d_model=64,d_ff=160,heads=4,kv_heads=2,vocab=128")
    words = (*SIM, "--system", system, "--hardware", "h100-80gb", *shape)
    wide = result_of(fsdpbench, tmp_path / "a", *words)
    fp8 = result_of(fsdpbench, tmp_path / "b", *words, *set_to("linear_dtype=fp8"))
    linear = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 160
    assert gathered(wide) - gathered(fp8) == 2 * 2 * linear
    assert fp8["communication"]["all_reduce"]["count"] == 1  # the scales of all weights
    assert fp8["communication"]["reduce_scatter"]["bytes"] == wide["communication"]["reduce_scatter"]["bytes"]
    assert fp8["unknown_operators"] == {}
    assert fp8["interval"]["step_time_s"][1] / fp8["step_time_s"] > (
        wide["interval"]["step_time_s"][1] / wide["step_time_s"]
    )


@pytest.mark.plain_cases("torch-fsdp1")
@pytest.mark.parametrize(
    ("system", "kind"),
    [("torch-fsdp1", "fp8"), ("impl-fsdp1", "fp8"), ("impl-fsdp2", "mxfp8"), ("torch-fsdp2", "nvfp4")],
)
def test_others_gather_16_bits(fsdpbench: Any, tmp_path: Path, system: str, kind: str) -> None:
    words = (*SIM, "--system", system, "--hardware", "b200")
    wide = result_of(fsdpbench, tmp_path / "a", *words)
    narrow = result_of(fsdpbench, tmp_path / "b", *words, *set_to(f"linear_dtype={kind}"))
    assert gathered(narrow) == gathered(wide)
    assert narrow["unknown_operators"] == {}
    assert narrow["work"]["kernels"] > wide["work"]["kernels"]


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("system", "kind"), [("torch-fsdp2", "fp8"), ("impl-fsdp2", "mxfp8"), ("single", "fp8")]
)
def test_compiled_casts_are_fused(fsdpbench: Any, tmp_path: Path, system: str, kind: str) -> None:
    gpus = ("--gpus", "1") if system == "single" else ()
    words = (*SIM, *gpus, "--system", system, "--hardware", "b200", *set_to(f"linear_dtype={kind}"))
    eager = result_of(fsdpbench, tmp_path / "a", *words)
    compiled = result_of(fsdpbench, tmp_path / "b", *words, *set_to("compile=true"))
    assert compiled["work"]["kernels"] < eager["work"]["kernels"]


@pytest.mark.campaign
@pytest.mark.parametrize("checkpointing", ["full", "op"])
def test_checkpointing_recomputes_narrow_layers(fsdpbench: Any, tmp_path: Path, checkpointing: str) -> None:
    words = (*SIM, "--system", "impl-fsdp2", "--hardware", "b200", *set_to("linear_dtype=fp8"))
    kept = result_of(fsdpbench, tmp_path / "a", *words)
    less = result_of(fsdpbench, tmp_path / "b", *words, *set_to(f"activation_checkpointing={checkpointing}"))
    assert less["peak_memory_bytes"]["allocated"] < kept["peak_memory_bytes"]["allocated"]
    assert less["work"]["kernels"] > kept["work"]["kernels"]


@pytest.mark.campaign
@pytest.mark.parametrize("kind", ["fp8", "mxfp8", "nvfp4"])
def test_cpu_ranks_learn_as_with_16_bits(fsdpbench: Any, tmp_path: Path, kind: str) -> None:
    words = ("--model", "llama-tiny", "--device", "cpu", "--gpus", "2", "--system", "impl-fsdp2")
    words += (*set_to("batch=1", "seq=64"),)
    wide = result_of(fsdpbench, tmp_path / "a", *words)
    narrow = result_of(fsdpbench, tmp_path / "b", *words, *set_to(f"linear_dtype={kind}"))
    assert narrow["loss"] != wide["loss"]
    for found, wanted in zip(narrow["loss"], wide["loss"], strict=False):
        assert found == pytest.approx(wanted, rel=0.02)


@pytest.mark.parametrize(
    ("hardware", "settings", "named"),
    [
        ("a100-80gb", {"linear_dtype": "fp8"}, "a100-80gb has no products in fp8"),
        ("h100-80gb", {"linear_dtype": "nvfp4"}, "h100-80gb has no products in nvfp4"),
        ("h100-80gb", {"linear_dtype": "mxfp8"}, "h100-80gb has no products in mxfp8"),
        ("b200", {"linear_dtype": "fp8", "lora": 8}, "leave lora out"),
        ("b200", {"linear_dtype": "fp8", "cp": 2}, "leave cp at 1"),
        ("b200", {"linear_dtype": "fp8", "cpu_offload": True}, "leave cpu_offload out"),
        ("b200", {"linear_dtype": "fp8", "optimizer": "muon"}, "leave muon"),
        ("b200", {"linear_dtype": "fp8", "graph": "step"}, "leave graph out"),
        ("b200", {"linear_dtype": "fp8", "reshard_after_forward": 2}, "reshard_after_forward=true"),
        ("b200", {"linear_dtype": "nvfp4", "compile": True}, "leave compile out"),
        ("b200", {"linear_dtype": "mxfp8", "seq": 24, "batch": 1}, "24 tokens a microbatch"),
    ],
)
def test_what_cannot_be_is_refused_by_name(hardware: str, settings: dict[str, Any], named: str) -> None:
    assert named in refusal_of("llama-tiny", hardware, settings)


@pytest.mark.parametrize(
    ("model", "shape", "named"),
    [
        ("t5-tiny", "", "family t5"),
        ("moe-tiny", "", "experts"),
        ("llama-tiny", "d_ff=100", "is 128 x 100, and fp8 needs multiples of 16"),
    ],
)
def test_no_layer_stays_behind_unsaid(model: str, shape: str, named: str) -> None:
    assert named in refusal_of(model, "b200", {"linear_dtype": "fp8"}, shape)


def test_software_of_its_time_and_other_trainers_do_not_have_it() -> None:
    assert "leave --software out" in refusal_of(
        "llama-tiny", "h100-80gb", {"linear_dtype": "fp8"}, software="fms-fsdp-2024"
    )
    for name in ("deepspeed-zero3", "megatron-fsdp"):
        assert "8 or 4 bits" in get_system(name).absent["linear_dtype"]


def refusal_of(
    model: str, hardware: str, settings: dict[str, Any], shape: str = "", software: str | None = None
) -> str:
    """Why impl-fsdp2 refuses, or nothing."""
    given = {"model": model, "gpus": 8, "device": "sim", "hardware": hardware}
    given |= {"shape": shape} if shape else {}
    given |= {"software": software} if software else {}
    target = make_request(given, {}, whole_space=False).target
    config = make_config(target, "impl-fsdp2", Settings.of(**settings), target.workload())
    return not_applicable(config).get("linear_dtype", "")
