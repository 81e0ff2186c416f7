"""`--device cuda` on the simulated cuda of CI: the path runs, says so, and the gate takes nothing of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fsdpbench.check.sides import stored_side
from fsdpbench.configuration.simulated_cuda import VARIABLE, SimulatedCuda, simulated_cuda
from fsdpbench.devices.detection import choose_device
from fsdpbench.errors import CannotJudgeError, UsageError


def rehearsed(*arguments: str, asked: str = "h100-80gb:2") -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, where "cuda" is simulated."""
    command = [sys.executable, "-m", "fsdpbench", *arguments]
    environment = os.environ | {VARIABLE: asked}
    return subprocess.run(command, capture_output=True, text=True, timeout=250, env=environment)


def test_a_run_through_the_cuda_path_is_no_measurement(fsdpbench: Any, tmp_path: Path) -> None:
    """Spawned rank, NCCL's set-up, events, profiler, memory statistics; then the gate."""
    folder = tmp_path / "runs"
    done = rehearsed(
        "run", "--device", "cuda", "--gpus", "1", "--model", "gpt-tiny", "-o", str(folder), "--json"
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout)
    assert (result["status"], result["device"]) == ("ok", "cuda")
    assert result["hardware"]["simulated"] is True
    assert "not measured" in result["hardware"]["source"]
    assert result["environment"]["variables"][VARIABLE] == "h100-80gb:2"
    assert result["peak_memory_bytes"]["allocated"] > 0
    assert result["time_s"]["compute_only"] > 0
    assert result["step_time_s"] > 0
    with pytest.raises(CannotJudgeError, match="says cuda and ran on a simulated GPU"):
        stored_side(folder)
    baseline = tmp_path / "baseline.json"
    done = fsdpbench("baseline", "create", str(folder), str(baseline))
    assert done.returncode == 3
    assert not baseline.exists()


@pytest.mark.parametrize("text", [":2", "h100-80gb:0", "h100-80gb:many", "h100-80gb:65"])
def test_what_the_variable_says_is_checked(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(UsageError, match=VARIABLE):
        simulated_cuda()


def test_a_rehearsal_has_as_many_gpus_as_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "a100-40gb:2")
    assert simulated_cuda() == SimulatedCuda("a100-40gb", 2)
    assert "simulated" in choose_device("cuda", 2, None).reason
    with pytest.raises(UsageError, match="3 GPUs are asked for and 2 found"):
        choose_device("cuda", 3, None)
    monkeypatch.setenv(VARIABLE, "")
    assert simulated_cuda() is None


def test_results_of_rehearsals_have_keys_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep that is resumed on a GPU runs its configurations again."""
    from fsdpbench.configuration.config import Measurement
    from fsdpbench.configuration.settings import Settings
    from fsdpbench.results.provenance import content_key
    from fsdpbench.sweep.planning import make_config, make_target

    target = make_target(
        model="gpt-tiny", shape={}, device="cuda", hardware=None, gpus=2, gpus_per_node=None, data=None,
        measurement=Measurement(1, 1, 1, timeout_s=60.0),
    )  # fmt: skip
    config = make_config(target, "impl-fsdp2", Settings.of(batch=2), target.workload())
    keys = []
    for text in ("", "h100-80gb", "a100-80gb"):
        monkeypatch.setenv(VARIABLE, text)
        keys.append(content_key(config))
    assert len(set(keys)) == 3


@pytest.mark.campaign
def test_several_ranks_run_under_every_system(tmp_path: Path) -> None:
    """One point a system on two ranks, and the same on one GPU that stands for eight."""
    systems = "impl-fsdp2,impl-fsdp1,torch-fsdp2,torch-fsdp1,torch-ddp"
    fixed = ["--wrap", "block", "--batch", "2", "--backward-prefetch", "pre", "--limit-all-gathers", "2"]
    fixed += ["--reduce-dtype", "fp32", "--model", "gpt-tiny", "--device", "cuda", "--system", systems]
    for name, ranks in (("nccl", ["--gpus", "2"]), ("emulated", ["--gpus", "8", "--emulate"])):
        done = rehearsed("sweep", *fixed, *ranks, "-o", str(tmp_path / name), "--json")
        assert done.returncode == 0, done.stderr[-3000:]
        results = [json.loads(path.read_text()) for path in (tmp_path / name).glob("*/result.json")]
        assert len(results) == 5
        for result in results:
            assert result["status"] == "ok", result["cause"]
            assert result["hardware"]["simulated"]
            assert result["communication"]["all_reduce"] or result["communication"]["all_gather"]


@pytest.mark.campaign
def test_calibration_finds_the_profile_again(tmp_path: Path) -> None:
    """Through `torch.cuda`, as on a GPU."""
    from fsdpbench.sim.hardware import load_profile

    file = tmp_path / "found.toml"
    done = rehearsed("calibrate", "--base", "h200", "-o", str(file))
    assert done.returncode == 0, done.stderr[-3000:]
    found, truth = load_profile(file), load_profile("h100-80gb")
    assert "a simulated NVIDIA H100" in found.source
    assert found.memory.capacity_gib == pytest.approx(truth.memory.capacity_gib, rel=0.01)
    assert found.attention.forward_tflops == pytest.approx(truth.attention.forward_tflops, rel=0.02)
    assert found.host_link.gb_s == pytest.approx(truth.host_link.gb_s, rel=0.02)
    assert found.cpu.operator_us == pytest.approx(truth.cpu.operator_us, rel=0.02)


@pytest.mark.campaign
def test_all_that_a_gpu_is_asked_for_runs(tmp_path: Path) -> None:
    """`ci/gpu.sh`, every part of it, with small models."""
    root = Path(__file__).parents[3]
    environment = os.environ | {VARIABLE: "h100-80gb:1", "QUICK": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    done = subprocess.run(
        ["bash", str(root / "ci/gpu.sh"), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=900,
        env=environment,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "nothing here is measured" in (tmp_path / "machine.txt").read_text()
    parts = ("doctor", "calibrate", "systems", "emulated", "predicted", "families", "allocator")
    for part in parts:
        assert (tmp_path / f"{part}.txt").stat().st_size > 0, part
    assert "equal after every step" in (tmp_path / "allocator.txt").read_text()
