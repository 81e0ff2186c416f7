"""`--device cuda` on the simulated cuda of CI: the path runs, says so, and the gate takes nothing of it."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdpbench.answers.check.records.sides import side_of
from fsdpbench.base.configuration.config import Config, Measurement
from fsdpbench.base.configuration.simulated_cuda import VARIABLE, SimulatedCuda, simulated_cuda
from fsdpbench.base.errors import CannotJudgeError, UsageError
from fsdpbench.base.settings import Settings
from fsdpbench.engine.devices.base import Placement
from fsdpbench.engine.devices.detection import choose_device
from fsdpbench.engine.results.provenance import content_key
from fsdpbench.engine.results.records import read_records
from fsdpbench.engine.results.result import outcome_of_records, record_result
from fsdpbench.engine.worker import run_rank
from fsdpbench.launch.elastic import rehearse
from fsdpbench.launch.point import timestamp
from fsdpbench.sweep.planning import make_config, make_target, without_absent

CommandLine = Callable[..., subprocess.CompletedProcess[str]]


def rehearsed(*arguments: str, asked: str = "h100-80gb:2") -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, where "cuda" is simulated."""
    command = [sys.executable, "-m", "fsdpbench", *arguments]
    environment = os.environ | {VARIABLE: asked}
    return subprocess.run(command, capture_output=True, text=True, timeout=250, env=environment)


def cuda_config() -> Config:
    """The smallest GPT on one GPU."""
    target = make_target(
        model="gpt-tiny", shape={}, device="cuda", hardware=None, gpus=1, gpus_per_node=None, data=None,
        measurement=Measurement(1, 1, 1, timeout_s=60.0),
    )  # fmt: skip
    return without_absent(make_config(target, "impl-fsdp2", Settings.of(batch=2), target.workload()))


def _run_rank(config: Config, folder: Path) -> None:
    """In a process of its own: as `launch/elastic.py` runs a rank."""
    placement = Placement(rank=0, world_size=1, local_rank=0)
    rehearse(config, placement)
    run_rank(config, placement, folder)
    os._exit(0)  # the simulated device leaves patches behind


def test_a_rank_on_the_cuda_path_measures_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """NCCL's set-up, events, profiler, memory statistics; then the gate."""
    monkeypatch.setenv(VARIABLE, "h100-80gb:2")
    config = cuda_config()
    process = multiprocessing.get_context("fork").Process(target=_run_rank, args=(config, tmp_path))
    process.start()
    process.join(100)
    assert process.exitcode == 0
    outcome = outcome_of_records(read_records(tmp_path), world_recorded=1)
    result = record_result(config, tmp_path, outcome, 1.0, timestamp()).to_dict()
    assert (result["status"], result["device"]) == ("ok", "cuda"), result["cause"]
    assert result["hardware"]["simulated"] is True
    assert "not measured" in result["hardware"]["source"]
    assert result["environment"]["variables"][VARIABLE] == "h100-80gb:2"
    assert result["peak_memory_bytes"]["allocated"] > 0
    assert result["time_s"]["compute_only"] > 0
    assert result["step_time_s"] > 0
    with pytest.raises(CannotJudgeError, match="says cuda and ran on a simulated GPU"):
        side_of("runs", {config.name: [result]})
    side_of("runs", {config.name: [result | {"hardware": {**result["hardware"], "simulated": False}}]})


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
    keys = []
    for text in ("", "h100-80gb", "a100-80gb"):
        monkeypatch.setenv(VARIABLE, text)
        keys.append(content_key(cuda_config()))
    assert len(set(keys)) == 3


@pytest.mark.campaign
def test_one_command_runs_and_the_gate_refuses_it(fsdpbench: CommandLine, tmp_path: Path) -> None:
    """With the launcher, which spawns its ranks for cuda."""
    folder, baseline = tmp_path / "runs", tmp_path / "baseline.json"
    done = rehearsed("run", "--device", "cuda", "--gpus", "1", "--model", "gpt-tiny", "-o", str(folder))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "simulated" in done.stderr
    assert fsdpbench("baseline", "create", str(folder), str(baseline)).returncode == 3
    assert not baseline.exists()


@pytest.mark.campaign
def test_several_ranks_run_under_every_system(tmp_path: Path) -> None:
    """One point a system on two ranks."""
    systems = "impl-fsdp2,impl-fsdp1,torch-fsdp2,torch-fsdp1,torch-ddp"
    fixed = ["--wrap", "block", "--batch", "2", "--backward-prefetch", "pre", "--limit-all-gathers", "2"]
    fixed += ["--reduce-dtype", "fp32", "--model", "gpt-tiny", "--device", "cuda", "--system", systems]
    fixed += ["--strategy", "FULL_SHARD", "--forward-prefetch", "0", "--compile", "false"]
    fixed += ["--activation-checkpointing", "none"]
    done = rehearsed("sweep", *fixed, "--gpus", "2", "-o", str(tmp_path / "nccl"), "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    results = [json.loads(path.read_text()) for path in (tmp_path / "nccl").glob("*/result.json")]
    assert len(results) == 5
    for result in results:
        assert result["status"] == "ok", result["cause"]
        assert result["hardware"]["simulated"]
        assert result["communication"]["all_reduce"] or result["communication"]["all_gather"]


@pytest.mark.campaign
def test_calibration_finds_the_profile_again(tmp_path: Path) -> None:
    """Through `torch.cuda`, as on a GPU."""
    from fsdpbench.sim.model.profile import load_profile

    file = tmp_path / "found.toml"
    done = rehearsed("calibrate", "--base", "h200", "-o", str(file))
    assert done.returncode == 0, done.stderr[-3000:]
    found, truth = load_profile(file), load_profile("h100-80gb")
    assert "a simulated NVIDIA H100" in found.source
    assert found.memory.capacity_gib == pytest.approx(truth.memory.capacity_gib, rel=0.01)
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
    parts = ("doctor", "calibrate", "systems", "predicted", "families", "allocator")
    for part in parts:
        assert (tmp_path / f"{part}.txt").stat().st_size > 0, part
    assert "equal after every step" in (tmp_path / "allocator.txt").read_text()
