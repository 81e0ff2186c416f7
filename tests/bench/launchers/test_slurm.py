"""Sweeps whose points are Slurm jobs, on a real Slurm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SHAPE = "layers=2,d_model=32,heads=2,vocab=64,max_seq=16"
CPU = ["--model", "gpt", "--shape", SHAPE, "--gpus", "2", "--device", "cpu", "--wrap", "block"]
SIM = ["--model", "gpt-125m", "--shape", "layers=2", "--gpus", "8", "--device", "sim", "--wrap", "block"]

TWO = ["--system", "impl-fsdp2", "--backward-prefetch", "pre,none", "--reduce-dtype", "fp32"]


Sweep = Callable[..., tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]]


@pytest.fixture
def swept(fsdpbench: Any, monkeypatch: pytest.MonkeyPatch) -> Sweep:
    """A sweep by jobs of this Slurm into this folder: how it ended, and its results."""

    def sweep(
        slurm: Any, folder: Path, *words: str
    ) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
        for name in slurm.environment.keys() - os.environ.keys():
            monkeypatch.setenv(name, slurm.environment[name])
        done = fsdpbench("sweep", *words, "--launcher", "slurm", "-o", str(folder), "--json")
        return done, json.loads(done.stdout)["results"] if done.stdout else []

    return sweep


def jobs(slurm: Any) -> list[str]:
    """Numbers of all jobs that Slurm still knows of; of an array, its tasks."""
    return slurm.call("squeue", "-h", "-r", "-t", "all", "-o", "%F_%a").split()


def test_a_simulated_sweep_is_an_array(slurm: Any, swept: Sweep, tmp_path: Path) -> None:
    done, results = swept(slurm, tmp_path / "run", *SIM, *TWO)
    assert done.returncode == 0, done.stderr
    assert [result["status"] for result in results] == ["ok"] * len(results)
    assert len(results) == 2
    assert (tmp_path / "run" / "report.html").is_file()
    assert [path.name for path in (tmp_path / "run").iterdir() if path.name.startswith(".")] == []
    arrays = {job.split("_")[0] for job in jobs(slurm)}
    assert len(arrays) == 1


@pytest.mark.campaign
def test_a_job_past_its_time_is_a_result_and_bad_options_are_refused(
    slurm: Any, swept: Sweep, tmp_path: Path
) -> None:
    words = ["--system", "torch-ddp", "--timeout", "0.5"]
    done, results = swept(slurm, tmp_path / "run", *CPU, *words)
    assert done.returncode == 4, done.stderr
    assert [result["status"] for result in results] == ["timeout"]
    done, _ = swept(slurm, tmp_path / "other", *CPU, "--partition", "nowhere")
    assert done.returncode == 5
    assert "Slurm does not take the job" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.campaign
def test_four_cpu_configurations_and_an_array_of_twenty(slurm: Any, swept: Sweep, tmp_path: Path) -> None:
    space = ["--system", "impl-fsdp2,impl-fsdp1", "--backward-prefetch", "pre,none"]
    done, results = swept(slurm, tmp_path / "cpu", *CPU, *space)
    assert done.returncode == 0, done.stderr
    assert [result["status"] for result in results] == ["ok"] * 4
    before = {job.split("_")[0] for job in jobs(slurm)}
    batches = ",".join(str(batch) for batch in range(1, 21))
    done, results = swept(slurm, tmp_path / "sim", *SIM, "--system", "impl-fsdp2", "--batch", batches)
    assert done.returncode == 0, done.stderr
    assert [result["status"] for result in results] == ["ok"] * 20
    assert len({job.split("_")[0] for job in jobs(slurm)} - before) == 1


@pytest.mark.campaign
def test_watched_from_outside(slurm: Any, swept: Sweep, tmp_path: Path) -> None:
    """One line a configuration, the jobs' states, and the page while jobs run and after them."""
    folder = tmp_path / "run"
    words = [sys.executable, "-m", "fsdpbench", "watch", str(folder)]
    watcher = subprocess.Popen(
        words, env=slurm.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    done, _ = swept(slurm, folder, *SIM, *TWO)
    out, err = watcher.communicate(timeout=60)
    assert (done.returncode, watcher.returncode) == (0, 0), err
    assert out.startswith("2/2 configurations")
    assert sum("ms a step" in line for line in err.splitlines()) == 2
    assert any(line.startswith("Slurm: ") for line in err.splitlines())
    assert 'http-equiv="refresh"' not in (folder / "report.html").read_text()


@pytest.mark.campaign
def test_a_job_of_two_nodes(slurm_of_two: Any, swept: Sweep, tmp_path: Path) -> None:
    """Each node's task starts its own ranks; they meet at the first node, and its task writes the result."""
    words = ["--system", "impl-fsdp2", "--strategy", "FULL_SHARD"]
    words += ["--gpus-per-node", "1"]
    slurm_of_two.environment["GLOO_SOCKET_IFNAME"] = "lo"
    done, results = swept(slurm_of_two, tmp_path / "run", *CPU, *words)
    assert done.returncode == 0, done.stderr
    (result,) = results
    assert result["status"] == "ok", result["cause"]
    assert result["config"]["gpus_per_node"] == 1
    assert len(result["traces"]) == 2
    assert {path.name for path in (Path(result["folder"]) / "logs").glob("node*_stderr.log")} == {
        "node0_stderr.log", "node1_stderr.log",
    }  # fmt: skip
    assert slurm_of_two.call("squeue", "-h", "-t", "all", "-o", "%D").split() == ["2"]
