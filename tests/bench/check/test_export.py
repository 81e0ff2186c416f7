"""Figures for histories of other tools: pytest-benchmark's command reads its file; asv's keys are there."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdpbench.answers.check.metrics import METRICS
from fsdpbench.answers.check.records.baseline import Baseline, Surroundings
from fsdpbench.answers.check.records.entries import Entry
from fsdpbench.engine.results.records import Status

CommandLine = Callable[..., subprocess.CompletedProcess[str]]
FACTS = {"device": "sim", "hardware": "h100-80gb", "torch": "2.13"}
MEASURED = {"device": "cpu", "hardware": "None", "torch": "2.13", "processor": "A/B 64-Core"}


def git(*words: str) -> str:
    own = ("-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false")
    return subprocess.run(["git", *own, *words], capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder: a repository of one commit."""
    monkeypatch.chdir(tmp_path)
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "one")
    return tmp_path


def baseline(path: Path, facts: dict[str, str], **steps: list[float]) -> str:
    """A baseline of configurations by the step times of their runs."""
    entries = {
        name: Entry(
            Status.OK,
            facts["device"],
            tuple({"step_time_s": step, "peak_reserved_bytes": 2**30, "kernels": 9} for step in runs),
        )
        for name, runs in steps.items()
    }
    entries["failed"] = Entry(Status.OOM, facts["device"], ({},))
    Baseline({}, {}).updated(entries, Surroundings(facts), "", ()).write(path)
    return str(path)


def test_pytest_benchmark_compares_the_file(fsdpbench: CommandLine, repository: Path) -> None:
    file = baseline(repository / "baseline.json", MEASURED, slow=[0.5, 0.7, 0.6, 0.6, 0.6], fast=[0.25] * 5)
    done = fsdpbench("compare", file, file, "--export", "benchmark", "bench.json")
    assert done.returncode == 0, done.stderr
    content = json.loads((repository / "bench.json").read_text())
    assert content["commit_info"]["id"] == git("rev-parse", "HEAD")
    slow = {each["name"]: each for each in content["benchmarks"]}["slow"]
    assert slow["extra_info"] == {"step_time_s": 0.6, "peak_reserved_bytes": 2**30, "kernels": 9}
    assert slow["stats"]["stddev"] == pytest.approx(0.0707, rel=0.01)
    words = [sys.executable, "-m", "pytest_benchmark", "compare", "bench.json", "--columns=min,max,rounds"]
    shown = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout
    rows = [line.split() for line in shown.splitlines() if line.startswith(("slow", "fast"))]
    assert rows == [
        ["fast", "250.0000", "(1.0)", "250.0000", "(1.0)", "5"],
        ["slow", "500.0000", "(2.00)", "700.0000", "(2.80)", "5"],
    ]


def test_asv_gets_a_benchmark_a_figure(fsdpbench: CommandLine, repository: Path) -> None:
    """The keys and versions that asv 0.6.6 reads (`asv publish` and `asv show` did)."""
    file = baseline(repository / "baseline.json", FACTS, one=[0.5], two=[0.25])
    assert fsdpbench.json("compare", file, file, "--export", "asv", "results", "--json")["compared"] == 3
    commit = git("rev-parse", "HEAD")
    result = json.loads((repository / "results" / "h100-80gb" / f"{commit[:8]}-torch2.13.json").read_text())
    assert (result["version"], result["commit_hash"], result["date"] % 1000) == (2, commit, 0)
    rows = {
        name: dict(zip(result["result_columns"], row, strict=True)) for name, row in result["results"].items()
    }
    assert rows["step_time_s"] == {"result": [0.5, 0.25], "params": [["'one'", "'two'"]], "version": "1"}
    known: dict[str, Any] = json.loads((repository / "results" / "benchmarks.json").read_text())
    assert known.pop("version") == 2
    assert known.keys() == rows.keys() <= METRICS.keys()
    assert (known["peak_reserved_bytes"]["unit"], known["peak_reserved_bytes"]["type"]) == ("bytes", "track")
    machine = json.loads((repository / "results" / "h100-80gb" / "machine.json").read_text())
    assert (machine["version"], machine["machine"]) == (1, result["params"]["machine"])


def test_an_export_that_cannot_be_is_refused_in_a_line(
    fsdpbench: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    file = baseline(tmp_path / "baseline.json", FACTS, one=[0.5])
    outside = fsdpbench("compare", file, file, "--export", "asv", "results")
    assert outside.returncode == 2
    assert "all figures are equal" in outside.stdout
    assert outside.stderr.startswith("fsdpbench: --export: git: fatal: not a git repository")
    assert fsdpbench("compare", file, file, "--export", "csv", "results").returncode == 2
    refused = fsdpbench("check", "--history", "--baseline", file, "--export", "asv", "results")
    assert (refused.returncode, "leave it out with --history" in refused.stderr) == (2, True)
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "one")
    (tmp_path / "results").touch()
    taken = fsdpbench("compare", file, file, "--export", "asv", "results")
    assert taken.returncode == 5
    assert "results: cannot be written" in taken.stderr
