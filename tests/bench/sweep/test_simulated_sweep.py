"""A sweep on simulated GPUs from end to end: what it leaves, resuming, exactness, being killed."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PROGRAM = "from fsdpbench.cli import main; main()"
SMALL = [
    "sweep",
    "--model",
    "gpt-125m",
    "--shape",
    "layers=2",
    "--gpus",
    "8",
    "--device",
    "sim",
    "--batch",
    "2",
]
SYSTEMS = ["--system", "impl-fsdp1,impl-fsdp2", "--backward-prefetch", "pre,none"]
TWELVE = [
    *SMALL,
    *SYSTEMS,
    "--wrap",
    "block,every-2",
    "--reduce-dtype",
    "fp32",
    "--limit-all-gathers",
    "2,off",
]
"""2 x 2 x 2 configurations of impl-fsdp1 and 2 x 2 of impl-fsdp2."""


def results(folder: Path) -> dict[str, dict[str, Any]]:
    return {path.parent.name: json.loads(path.read_text()) for path in folder.glob("impl-*/result.json")}


def without_bench(folder: Path) -> dict[str, str]:
    """Each result as text, without the dates and durations of the bench itself."""
    texts = {}
    for name, result in results(folder).items():
        result.pop("bench")
        texts[name] = json.dumps(result, indent=1)
    return texts


@pytest.fixture(scope="module")
def swept(
    fsdpbench: Any, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("sweep") / "run"
    return folder, fsdpbench(*TWELVE, "-o", str(folder))


def test_it_leaves_what_was_promised(
    swept: tuple[Path, subprocess.CompletedProcess[str]], matches_schema: Callable[[str, Any], None]
) -> None:
    folder, done = swept
    assert done.returncode == 0, done.stderr
    found = results(folder)
    assert len(found) == 12
    for name, result in found.items():
        assert result["status"] == "ok", result["cause"]
        matches_schema("result", result)
        assert result["hardware"]["simulated"] is True
        assert result["loss"] is None
        assert sum(result["time_s"].values()) == pytest.approx(result["traced_step_time_s"], abs=2e-9)
        for trace in result["traces"]:
            assert (folder / name / trace).is_file()
        assert (folder / name / "stdout.log").is_file()
    assert (folder / "report.html").stat().st_size > 1_000_000
    with sqlite3.connect(folder / "results.sqlite") as connection:
        (rows,) = connection.execute("SELECT count(*) FROM results WHERE step_time_s > 0").fetchone()
    assert rows == 12


def test_it_says_what_it_did(swept: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    _, done = swept
    assert "simulating 8 x" in done.stderr
    assert "[12/12]" in done.stderr
    assert "limit_all_gathers is not applicable" in done.stderr
    assert "Report: " in done.stdout
    assert "Simulated on a100-80gb, it gives " in done.stdout


def test_its_page_is_that_of_its_files(
    fsdpbench: Any, swept: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """The sweep draws traces that its configurations have analysed; `report` reads them again."""
    folder, _ = swept
    page = folder / "report.html"
    of_sweep = page.read_bytes()
    page.unlink()  # it would stay
    assert fsdpbench("report", str(folder)).returncode == 0
    assert page.read_bytes() == of_sweep


def test_the_same_command_again_runs_nothing(
    fsdpbench: Any,
    swept: tuple[Path, subprocess.CompletedProcess[str]],
    matches_schema: Callable[[str, Any], None],
) -> None:
    folder, _ = swept
    before = {path: path.stat().st_mtime_ns for path in folder.glob("impl-*/result.json")}
    (folder / "report.html").unlink()
    again = fsdpbench(*TWELVE, "-o", str(folder), "--json")
    assert again.returncode == 0, again.stderr
    content = json.loads(again.stdout)
    matches_schema("sweep", content)
    assert len(content["results"]) == 12
    assert "12 of 12 configurations are done already" in again.stderr
    assert {path: path.stat().st_mtime_ns for path in folder.glob("impl-*/result.json")} == before
    assert (folder / "report.html").is_file()


def test_two_runs_are_equal_to_the_byte_and_killing_loses_only_what_is_in_flight(
    fsdpbench: Any, swept: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    folder, again = swept[0], tmp_path / "again"
    command = [sys.executable, "-c", PROGRAM, *TWELVE, "-o", str(again), "--jobs", "2"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE) as sweep:
        deadline = time.monotonic() + 120
        while len(results(again)) < 4 and sweep.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        sweep.send_signal(signal.SIGKILL)
    survived = set(results(again))
    assert 4 <= len(survived) < 12
    wait_until_nothing_runs_in(again)
    kept = {name: (again / name / "result.json").stat().st_mtime_ns for name in survived}
    done = fsdpbench(*TWELVE, "-o", str(again))
    assert done.returncode == 0, done.stderr
    assert {name: (again / name / "result.json").stat().st_mtime_ns for name in survived} == kept
    assert without_bench(again) == without_bench(folder)
    assert not list(again.glob(".work-*"))


def wait_until_nothing_runs_in(folder: Path) -> None:
    """Killed with SIGKILL, the sweep must take its children with it."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if not any(str(folder) in _open_files(pid) for pid in os.listdir("/proc") if pid.isdigit()):
            return
        time.sleep(0.1)
    raise AssertionError(f"processes of the killed sweep still write into {folder}")


def _open_files(pid: str) -> str:
    try:
        return " ".join(os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd"))
    except OSError:
        return ""


def test_out_of_memory_is_a_result_with_torchs_own_words(fsdpbench: Any, tmp_path: Path) -> None:
    words = ["run", "--model", "gpt-2.8b", "--gpus", "8", "--device", "sim", "--batch", "40", "--json"]
    result = fsdpbench.json(*words, "-o", str(tmp_path / "run"))
    assert result["status"] == "oom"
    assert "CUDA out of memory. Tried to allocate" in result["cause"]["message"]
    assert result["step_time_s"] is None
    assert result["traces"] == []
