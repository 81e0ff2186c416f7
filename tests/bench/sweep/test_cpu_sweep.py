"""A sweep over real ranks from the command line: what it leaves, that it resumes, that no process stays."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

COMMAND = (sys.executable, "-c", "from fsdpbench.cli import main; main()")
SHAPE = "layers=2,d_model=32,heads=2,vocab=64,max_seq=16"
MODEL = ("--model", "gpt", "--shape", SHAPE, "--batch", "2", "--gpus", "2", "--device", "cpu")
SPACE = ("--system", "impl-fsdp1,impl-fsdp2,torch-ddp", "--wrap", "block", "--strategy", "FULL_SHARD")
SPACE += ("--backward-prefetch", "none")
POINTS = 3  # both front ends, and DDP, which prefetches nothing


@dataclass
class Sweep:
    """One sweep in a folder of its own; every process it starts carries `mark` in its environment."""

    folder: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*COMMAND, "sweep", *MODEL, *words, "-o", str(self.folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "FSDPBENCH_TEST_MARK": self.mark, "NO_COLOR": "1"},
            # A shell starts what runs in its background deaf to it.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def run(self, *words: str) -> tuple[int, str, str]:
        with self.start(*words) as process:
            stdout, stderr = process.communicate(timeout=200)
        return process.returncode, stdout, stderr

    @property
    def results(self) -> dict[str, dict[str, Any]]:
        """Results of whole configuration folders, by folder."""
        return {
            path.parent.name: json.loads(path.read_text())
            for path in sorted(self.folder.glob("*/result.json"))
            if not path.parent.name.startswith(".")
        }

    def written(self) -> dict[str, int]:
        return {name: (self.folder / name / "result.json").stat().st_mtime_ns for name in self.results}

    def processes(self) -> list[int]:
        """Running processes of this sweep."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if self.mark.encode() in path.read_bytes():
                    found.append(int(path.parent.name))
            except OSError:
                continue
        return found

    def writers(self) -> list[int]:
        """Processes that write their errors into its folder, as ranks and their agents do."""
        found = []
        for path in Path("/proc").glob("[0-9]*/fd/2"):
            try:
                if os.readlink(path).startswith(f"{self.folder}/"):
                    found.append(int(path.parts[2]))
            except OSError:
                continue
        return found

    def wait_until_gone(self) -> None:
        deadline = time.monotonic() + 20
        while self.processes():
            assert time.monotonic() < deadline, f"processes left behind: {self.processes()}"
            time.sleep(0.05)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Sweep, str, str]:
    sweep = Sweep(tmp_path_factory.mktemp("sweep") / "run")
    code, stdout, stderr = sweep.run(*SPACE)
    assert code == 0, stderr
    sweep.wait_until_gone()
    return sweep, stdout, stderr


def test_folder_holds_what_the_design_says(done: tuple[Sweep, str, str]) -> None:
    sweep, _, _ = done
    assert len(sweep.results) == POINTS
    for name in sweep.results:
        left = {path.relative_to(sweep.folder / name).as_posix() for path in (sweep.folder / name).rglob("*")}
        assert left >= {"config.json", "result.json", "stdout.log", "stderr.log"}
        assert left >= {f"trace/rank{rank}_trace.json.gz" for rank in range(2)}
        assert left >= {f"trace/rank{rank}_record.json" for rank in range(2)}
    assert "<html" in (sweep.folder / "report.html").read_text()[:500].lower()
    assert (sweep.folder / "sweep.toml").exists()
    with sqlite3.connect(sweep.folder / "results.sqlite") as index:
        (table,) = index.execute("select name from sqlite_master where type='table'").fetchone()
        assert index.execute(f"select count(*) from {table}").fetchone() == (POINTS,)
    assert not list(sweep.folder.rglob("*partial*"))


def test_results_are_measured_and_whole(done: tuple[Sweep, str, str]) -> None:
    for name, result in done[0].results.items():
        assert result["status"] == "ok", name
        assert result["hardware"]["simulated"] is False
        assert result["step_time_s"] > 0
        assert result["tokens_per_s_per_gpu"] == pytest.approx(2 * 16 / result["step_time_s"])
        assert sum(result["time_s"].values()) == pytest.approx(result["traced_step_time_s"], abs=1e-6)
        assert 0 <= result["overlap_fraction"] <= 1
        assert all(share >= 0 for share in result["time_s"].values())
        # What a CPU cannot know.
        assert result["mfu"] is None
        assert result["hfu"] is None
        assert result["peak_memory_bytes"] is None


def test_every_system_computes_the_same_losses(done: tuple[Sweep, str, str]) -> None:
    losses = {name: result["loss"] for name, result in done[0].results.items()}
    reference = next(values for name, values in losses.items() if name.startswith("torch-ddp"))
    # Warm-up ends when steps are stable, so that the number of steps differs.
    steps = min(len(values) for values in losses.values())
    assert steps >= 8
    for name, values in losses.items():
        assert values[:steps] == pytest.approx(reference[:steps], rel=1e-5), name


def test_communication_is_that_of_the_system(done: tuple[Sweep, str, str]) -> None:
    for name, result in done[0].results.items():
        # FSDP gathers parameters; DDP only reduces gradients.
        gathers = result["communication"].get("all_gather") or {"count": 0}
        assert (gathers["count"] == 0) == name.startswith("torch-ddp"), name


def test_bytes_on_the_wire_are_known(done: tuple[Sweep, str, str]) -> None:
    """Full sharding sends 1.5 times what replication does: two gathers and one reduction, no all-reduce."""
    sent = {}
    for name, result in done[0].results.items():
        kinds = result["communication"].values()
        sent[name] = sum(kind["wire_bytes"] or 0 for kind in kinds)
    replicated = next(total for name, total in sent.items() if name.startswith("torch-ddp"))
    for name, total in sent.items():
        if not name.startswith("torch-ddp"):
            # The root, a sixth of this small model, is gathered once.
            assert 1.38 < total / replicated < 1.5, name


def test_table_and_recommendation_end_the_sweep(done: tuple[Sweep, str, str]) -> None:
    _, stdout, stderr = done
    for system in ("impl-fsdp1", "impl-fsdp2", "torch-ddp"):
        assert system in stdout
    assert "Run " in stdout
    assert "report.html" in stdout
    assert f"[{POINTS}/{POINTS}]" in stderr


def test_second_run_finds_everything_done(fsdpbench: Any, done: tuple[Sweep, str, str]) -> None:
    sweep, _, _ = done
    before = sweep.written()
    again = fsdpbench("sweep", *MODEL, *SPACE, "-o", str(sweep.folder))
    assert again.returncode == 0, again.stderr
    assert sweep.written() == before
    assert "[1/" not in again.stderr


@pytest.mark.campaign
def test_killed_in_the_middle_it_resumes(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path / "run")
    with sweep.start(*SPACE) as process:
        wait_for_first_result(sweep, process)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
    sweep.wait_until_gone()
    kept = sweep.written()
    assert 1 <= len(kept) < POINTS
    code, _, stderr = sweep.run(*SPACE)
    assert code == 0, stderr
    assert len(sweep.results) == POINTS
    assert {name: when for name, when in sweep.written().items() if name in kept} == kept


@pytest.mark.campaign
def test_interrupted_it_says_so_and_leaves_no_process(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path / "run")
    with sweep.start(*SPACE) as process:
        wait_for_first_result(sweep, process)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    sweep.wait_until_gone()
    assert process.returncode == 130
    assert stderr.rstrip().splitlines()[-1].startswith("fsdpbench: interrupted; finished work is kept")
    assert "Traceback" not in stderr


def wait_for_first_result(sweep: Sweep, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not sweep.results:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "no configuration finishes"
        time.sleep(0.02)


def test_a_configuration_past_its_timeout_is_a_result(fsdpbench: Any, tmp_path: Path) -> None:
    sweep = Sweep(tmp_path / "run")
    words = ("--system", "torch-ddp", "--timeout", "0.3", "--wrap", "block", "-o", str(sweep.folder))
    done = fsdpbench("sweep", *MODEL, *words)
    assert done.returncode == 4, done.stderr
    (result,) = sweep.results.values()
    assert result["status"] == "timeout"
    assert "ran past 0.3 s" in result["cause"]["message"]
    deadline = time.monotonic() + 20
    while left := sweep.writers():
        assert time.monotonic() < deadline, f"processes left behind: {left}"
        time.sleep(0.05)
