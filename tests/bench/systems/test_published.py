"""Systems of published runs: what their software costs in simulated steps, and what it refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest

FIGURES = ("step_time_s", "peak_memory_bytes", "time_s", "hardware_tflops_per_gpu")


def run(fsdpbench: Any, tmp_path: Any, *words: str, **changed: str) -> dict[str, Any]:
    named = {"--model": "gpt-tiny", "--device": "sim", "--gpus": "8"} | {
        f"--{k}": v for k, v in changed.items()
    }
    done = fsdpbench("run", *sum(named.items(), ()), *words, "-o", str(tmp_path / "run"), "--json")
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_what_the_trainer_does_costs_time_and_memory(fsdpbench: Any, tmp_path: Any) -> None:
    plain, early, late = (
        run(fsdpbench, tmp_path, system)
        for system in ("torch-fsdp1-1.13", "llm-foundry-0.1", "llm-foundry-0.4")
    )
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
    assert "not_applicable: llm-foundry-0.1" in done.stdout
    assert "runs are of GPTs, not of llama2-7b" in done.stdout
