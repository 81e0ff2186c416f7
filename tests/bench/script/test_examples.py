"""The scripts in docs/examples train on simulated GPUs as they are, and the command line tells of it."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import RunScript

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"
SMALL = ("--layers", "2", "--width", "192", "--length", "128", "--vocab", "1000", "--batch", "2")
COLLECTIVES = {
    "train_fsdp2.py": {"all_gather": 5, "reduce_scatter": 3},  # the head's unit is gathered once
    "train_fsdp1.py": {"all_gather": 5, "reduce_scatter": 3},
    "train_ddp_amp.py": {"all_reduce": 2},  # the first bucket is a small one
}


@pytest.mark.parametrize(
    ("script", "gpus"),
    [
        *((script, 8) for script in COLLECTIVES),
        pytest.param("train_fsdp2.py", 64, marks=pytest.mark.campaign),
        pytest.param("train_fsdp1.py", 64, marks=pytest.mark.campaign),
        pytest.param("train_ddp_amp.py", 64, marks=pytest.mark.campaign),
    ],
)
def test_it_is_measured_like_any_configuration(script: str, gpus: int, run_script: RunScript) -> None:
    run = run_script(EXAMPLES / script, *SMALL, gpus=gpus)
    result = run.result
    assert result["status"] == "ok", run.cause
    assert result["config"]["gpus"] == gpus
    assert result["step_time_s"] > 0
    assert sum(result["time_s"].values()) == pytest.approx(result["traced_step_time_s"])
    assert result["peak_memory_bytes"]["reserved"] >= result["peak_memory_bytes"]["allocated"] > 1 << 20
    assert result["unknown_operators"] == {}
    assert result["trace_trusted"]
    counts = {kind: figures["count"] for kind, figures in result["communication"].items()}
    assert counts.items() >= COLLECTIVES[script].items()
    assert "step 5" in run.output
    assert "step 7" not in run.output, "all was measured after seven steps"


@pytest.mark.campaign
def test_units_of_fully_shard_compile(run_script: RunScript) -> None:
    """As `--advise` tries it: nothing breaks, nothing is compiled twice, the collectives are the same."""
    script = EXAMPLES / "train_fsdp2.py"
    eager, compiled = (run_script(script, *SMALL, varied=varied) for varied in (None, "compile"))
    for run, is_compiled in ((eager, False), (compiled, True)):
        assert run.result["status"] == "ok", run.cause
        assert run.result["compiled"] is is_compiled
    found = compiled.result["compilation"]
    assert found["kernels"] > 0
    assert (found["graph_breaks"], found["recompilations"]) == ({}, {})
    counts = [
        {kind: figures["count"] for kind, figures in run.result["communication"].items()}
        for run in (eager, compiled)
    ]
    assert counts[0] == counts[1]


def test_fsdp2_goes_on_to_its_sharded_checkpoint(run_script: RunScript, tmp_path: Path) -> None:
    arguments = ("--steps", "8", "--accumulate", "2", "--checkpoint-activations")
    run = run_script(
        EXAMPLES / "train_fsdp2.py", *SMALL, *arguments, "--save", str(tmp_path / "saved"), to_the_end=True
    )
    assert run.result["status"] == "ok", run.cause
    assert "step 7" in run.output
    assert run.written(tmp_path / "saved" / ".metadata").is_file()
    assert not (tmp_path / "saved").exists()
    # Full checkpointing runs every block's forward again: a third more products in the blocks.
    assert 1.1 < run.result["hardware_tflops_per_gpu"] / run.result["tflops_per_gpu"] < 4 / 3


def test_fsdp1_exports_the_bench_s_trace_and_a_full_checkpoint(run_script: RunScript, tmp_path: Path) -> None:
    import torch

    saved, profiled = tmp_path / "model.pt", tmp_path / "profile"
    arguments = ("--steps", "8", "--save", str(saved), "--profile", str(profiled))
    run = run_script(EXAMPLES / "train_fsdp1.py", *SMALL, *arguments, to_the_end=True)
    assert run.result["status"] == "ok", run.cause
    weights = torch.load(run.written(saved))
    assert weights["head.weight"].shape == (1000, 192)
    assert {tensor.device.type for tensor in weights.values()} == {"cpu"}
    ours = gzip.decompress((run.folder / "trace" / "rank0_trace.json.gz").read_bytes())
    exported = list(profiled.glob("*.pt.trace.json"))
    assert exported
    assert all(path.read_bytes() == ours for path in exported)


def test_ddp_writes_a_memory_snapshot_with_its_stacks(run_script: RunScript, tmp_path: Path) -> None:
    path = tmp_path / "memory.pickle"
    arguments = ("--steps", "7", "--memory-snapshot", str(path))
    run = run_script(EXAMPLES / "train_ddp_amp.py", *SMALL, *arguments, to_the_end=True)
    assert run.result["status"] == "ok", run.cause
    snapshot = pickle.loads(path.read_bytes())
    allocations = [entry for entry in snapshot["device_traces"][0] if entry["action"] == "alloc"]
    files = {Path(frame["filename"]).name for entry in allocations for frame in entry["frames"]}
    assert {"small_gpt.py", "train_ddp_amp.py"} <= files
    held = sum(
        block["size"]
        for segment in snapshot["segments"]
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    )
    assert held == sum(segment["allocated_size"] for segment in snapshot["segments"]) > 0


def test_the_command_line_runs_it_and_the_report_shows_it(fsdpbench: Any, tmp_path: Path) -> None:
    folder = str(tmp_path / "runs")
    script = str(EXAMPLES / "train_fsdp2.py")
    result = fsdpbench.json(
        "run", "--script", script, "--gpus", "16", "--jitter", "3", "-o", folder, "--json", "--", *SMALL
    )
    assert result["config"]["script"]["arguments"] == list(SMALL)
    assert "jitter" in result["hardware"]["title"], "noise is labelled"
    assert len(set(result["measured"]["step_times_s"])) > 1
    command = json.loads((Path(result["folder"]) / "config.json").read_text())["command"]
    assert "--jitter seed=3" in command
    assert command.endswith(" ".join(SMALL))
    table = fsdpbench("report", folder, "--format", "md")
    assert table.returncode == 0, table.stderr
    name = "train-fsdp2-16x-a100-80gb-jitter-3"
    assert f"One configuration was run: {name}. Simulated on a100-80gb, it gives " in table.stdout
    assert "None of the" not in table.stdout
    assert fsdpbench("report", folder).returncode == 0
