"""The models people train, as their issue wants them shown: torch's FSDP2 and ours side by side, on simulated
GPUs. What is printed (`pytest -s`) is in `ci/measured/models.txt`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsdpbench.workloads import get_workload
from fsdpbench.workloads.hf_config import translate

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(3000)]

PUBLISHED = json.loads((Path(__file__).parents[2] / "data" / "hf_configs.json").read_text())
EIGHT = (
    "llama-3-8b", "qwen3-8b", "qwen3-32b", "qwen3-30b-a3b", "mistral-7b", "mixtral-8x7b", "gpt-oss-20b",
    "gemma-3-27b-text",
)  # fmt: skip
BOTH = (
    "--system", "torch-fsdp2,impl-fsdp2", "--wrap", "block", "--backward-prefetch", "pre",
    "--param-dtype", "bf16", "--reduce-dtype", "fp32", "--strategy", "FULL_SHARD", "--compile", "false",
    "--forward-prefetch", "0",
)  # fmt: skip
"""Two systems, and no setting that the default preset varies."""
FULL = ("--device", "sim", "--hardware", "h100-80gb", "--activation-checkpointing", "full")
LENGTHS = "lognormal:900,0.6"
GPT = ("--model", "gpt-2.8b", "--gpus", "8", "--device", "sim", "--batch", "4", "--seq", "2048")


def swept(fsdpbench: Any, folder: Path, *words: str) -> list[dict[str, Any]]:
    done = fsdpbench("sweep", *words, *BOTH, *FULL, "-o", str(folder), "--json")
    results: list[dict[str, Any]] = json.loads(done.stdout)["results"]
    assert {result["status"] for result in results} == {"ok"}, [r["cause"] for r in results]
    for result in results:
        peaks = {name: round(each / 2**30, 1) for name, each in result["peak_memory_bytes"].items()}
        rate = result["tokens_per_s_per_gpu"]
        print(
            f"{result['name']}: {result['step_time_s'] * 1e3:,.0f} ms, {rate:,.0f} tokens/s/GPU, GiB {peaks}"
        )
    return results


def of_system(results: list[dict[str, Any]], system: str, **settings: Any) -> dict[str, Any]:
    (found,) = (
        each
        for each in results
        if each["config"]["system"] == system
        and all(each["config"]["settings"][name] == value for name, value in settings.items())
    )
    return found


@pytest.mark.parametrize("name", EIGHT)
def test_a_configuration_file_on_64_gpus(fsdpbench: Any, tmp_path: Path, name: str) -> None:
    config = PUBLISHED[name]["config"]
    found = translate(config)
    assert get_workload(found.family, found.values).parameters == PUBLISHED[name]["parameters"]
    file = tmp_path / f"{name}.json"
    file.write_text(json.dumps(config))
    results = swept(fsdpbench, tmp_path / "out", "--hf-config", str(file), "--gpus", "64", "--batch", "1")
    assert len(results) == 2


def test_lora_beside_full_fine_tuning(fsdpbench: Any, tmp_path: Path) -> None:
    words = (
        "--model",
        "qwen3-8b",
        "--gpus",
        "8",
        "--batch",
        "1",
        "--lora",
        "off,16",
        "--reduce-dtype",
        "fp32",
    )
    results = swept(fsdpbench, tmp_path / "out", *words)
    for system in ("torch-fsdp2", "impl-fsdp2"):
        full, adapted = (of_system(results, system, lora=rank) for rank in (0, 16))
        spared = full["peak_memory_bytes"]["allocated"] - adapted["peak_memory_bytes"]["allocated"]
        assert spared > 0.6 * 14 * PUBLISHED["qwen3-8b"]["parameters"] / 8


def test_experts_shared_by_8_ranks_of_64(fsdpbench: Any, tmp_path: Path) -> None:
    words = ("--model", "mixtral-8x7b", "--gpus", "64", "--set", "ep=1,8", "--batch", "2")
    results = swept(fsdpbench, tmp_path / "out", *words)
    for system in ("torch-fsdp2", "impl-fsdp2"):
        alone, shared = (of_system(results, system, ep=ranks) for ranks in (1, 8))
        assert shared["peak_memory_bytes"]["reserved"] < 0.7 * alone["peak_memory_bytes"]["reserved"]
        assert alone["tflops_per_gpu"] * alone["step_time_s"] == pytest.approx(
            shared["tflops_per_gpu"] * shared["step_time_s"], rel=1e-9
        )


def test_tensor_and_expert_parallelism_together_on_simulated_gpus(fsdpbench: Any, tmp_path: Path) -> None:
    words = ("--model", "mixtral-8x7b", "--gpus", "64", "--set", "tp=2", "--set", "ep=8", "--batch", "2")
    assert len(swept(fsdpbench, tmp_path / "out", *words)) == 2


def test_tensor_parallelism_of_a_llama_of_70_b(fsdpbench: Any, tmp_path: Path) -> None:
    words = ("--model", "llama3-70b", "--gpus", "64", "--set", "tp=1,2,4", "--batch", "1")
    results = swept(fsdpbench, tmp_path / "out", *words)
    for system in ("torch-fsdp2", "impl-fsdp2"):
        peaks = [of_system(results, system, tp=tp)["peak_memory_bytes"]["reserved"] for tp in (1, 2, 4)]
        assert peaks == sorted(peaks, reverse=True)


@pytest.mark.parametrize("system", ["torch-fsdp2", "impl-fsdp2"])
def test_a_soak_finds_the_retry_that_one_step_does_not(fsdpbench: Any, tmp_path: Path, system: str) -> None:
    words = (*GPT, "--hardware", "a100-40gb", "--system", system, "--json")
    one = json.loads(fsdpbench("run", *words, "-o", str(tmp_path / "one")).stdout)
    assert (one["status"], one["alloc_retries_per_step"]) == ("ok", 0)
    soak = ("--soak", "30", "--seq-lengths", LENGTHS)
    many = json.loads(fsdpbench("run", *words, *soak, "-o", str(tmp_path / "many")).stdout)
    print(
        f"{system}: first retry in step {many['soak']['first_retry_step']}, {many['soak']['retries']} of 30"
    )
    assert 1 < many["soak"]["first_retry_step"] <= 30


@pytest.mark.parametrize("system", ["torch-fsdp2", "impl-fsdp2"])
@pytest.mark.parametrize("lengths", [f"{LENGTHS},buckets=16", LENGTHS])
def test_a_thousand_steps(fsdpbench: Any, tmp_path: Path, system: str, lengths: str) -> None:
    words = (*GPT, "--system", system, "--soak", "1000", "--seq-lengths", lengths, "--json")
    result = json.loads(fsdpbench("run", *words, "-o", str(tmp_path / "out")).stdout)
    bench = result["bench"]
    print(f"{system}, {lengths}: {bench['duration_s']} s, CPU {bench['cpu_s']} s")
    assert result["soak"]["steps_done"] == 1000
