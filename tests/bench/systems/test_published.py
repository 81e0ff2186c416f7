"""Systems of published runs: what their software costs in simulated steps, and what it refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fsdpbench.sim.model.software import CURRENT, software_names
from fsdpbench.systems import offers


def run(fsdpbench: Any, tmp_path: Any, *words: str) -> dict[str, Any]:
    done = fsdpbench(
        "run", "--device", "sim", "--gpus", "8", *words, "-o", str(tmp_path / "run"), "--json"
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_every_system_names_software_that_comes_along() -> None:
    named = {each.name: each.thing.software for each in offers() if each.thing is not None}
    published = {name: software for name, software in named.items() if software != CURRENT}
    assert set(named.values()) <= set(software_names())
    assert published == {
        "torch-fsdp1-1.13": "fsdp1-2022",
        "llm-foundry-0.1": "composer-2023-spring",
        "llm-foundry-0.4": "composer-2023-autumn",
    }


def test_a_system_of_published_runs_is_torchs_fsdp1_under_its_software(fsdpbench: Any, tmp_path: Any) -> None:
    common = ("--model", "gpt-tiny", "--activation-checkpointing", "full")
    system = run(fsdpbench, tmp_path, *common, "--system", "llm-foundry-0.1")
    named = run(fsdpbench, tmp_path, *common, "--system", "torch-fsdp1", "--software", "composer-2023-spring")
    plain = run(fsdpbench, tmp_path, *common, "--system", "torch-fsdp1")
    for figure in ("step_time_s", "peak_memory_bytes", "time_s", "hfu"):
        assert named[figure] == system[figure]
        assert named[figure] != plain[figure]
    assert system["software"] == named["software"] == "composer-2023-spring"
    assert "software" not in plain
    assert "software" not in plain["config"]


@pytest.mark.campaign
def test_what_the_trainer_does_costs_time_and_memory(fsdpbench: Any, tmp_path: Any) -> None:
    plain, early, late = (
        run(
            fsdpbench, tmp_path, "--model", "gpt-350m", "--hardware", "h100-80gb",
            "--shape", "fp32_loss=false", "--system", system, "--batch", "16", "--reduce-dtype", "bf16",
        )
        for system in ("torch-fsdp1-1.13", "llm-foundry-0.1", "llm-foundry-0.4")
    )  # fmt: skip
    rows = 16 * 2048
    logits = rows * 50304
    # Twice log-probabilities and their copy in fp32: 20 bytes a logit, at 3.35 TB/s at most.
    assert early["step_time_s"] > plain["step_time_s"] - 0.002 + 20 * logits / 3.35e12
    # Packing copies q, k, v and the output of every layer, forward and backward: 8 passes, read and write.
    assert late["step_time_s"] > early["step_time_s"] + 24 * 8 * 4 * rows * 1024 / 3.35e12
    # Its packed copies are kept for backward, beside nothing that could be let go: the padded output.
    grown = late["peak_memory_bytes"]["allocated"] - early["peak_memory_bytes"]["allocated"]
    assert grown == pytest.approx(24 * 2 * rows * 1024, rel=0.1)


def test_other_models_are_refused(fsdpbench: Any) -> None:
    done = fsdpbench(
        "run", "--model", "llama2-7b", "--device", "sim", "--gpus", "8", "--system", "llm-foundry-0.1"
    )
    assert "not_applicable: llm-foundry-0.1 cannot run this: model: " in done.stdout
    assert "trainer.metrics) is of GPTs, not of llama2-7b" in done.stdout


@pytest.mark.parametrize("system", ["torch-fsdp1-1.13", "llm-foundry-0.1"])
def test_checkpointing_by_operator_is_refused(system: str, fsdpbench: Any) -> None:
    done = fsdpbench(
        "run", "--model", "gpt-tiny", "--device", "sim", "--system", system,
        "--activation-checkpointing", "op",
    )  # fmt: skip
    assert f"{system} cannot run this: activation_checkpointing: " in done.stdout
    assert "checkpointing by operator came with torch 2.4" in done.stdout
