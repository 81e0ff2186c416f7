"""`check --history`: the figures of a baseline over its commits, and each planted step found."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsdpbench.answers.check.history import exact_steps, measured_steps
from fsdpbench.answers.check.records.baseline import torch_minor

Call = Callable[..., subprocess.CompletedProcess[str]]
FIGURES = {
    "step_time_s": 0.2, "compute_s": 0.1, "peak_allocated_bytes": 1e9, "peak_active_bytes": 1e9,
    "peak_reserved_bytes": 2e9, "kernels": 100,
}  # fmt: skip


def baseline(runs: list[dict[str, float]], device: str = "sim") -> dict[str, Any]:
    configuration = {"status": "ok", "device": device, "runs": [{**FIGURES, **run} for run in runs]}
    figures = {"configurations": {"only-one": configuration}, "surroundings": {"device": device}}
    return {"schema": 1, "space": {"model": "gpt-tiny", "device": device}, "sets": {torch_minor(): figures}}


@pytest.fixture
def repository(tmp_path: Path) -> Callable[..., Path]:
    """Commits one content after the other as `baseline.json`."""

    def git(*words: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *words], check=True, capture_output=True)

    def commit(contents: list[str]) -> Path:
        git("init", "-q")
        for number, content in enumerate(contents):
            (tmp_path / "baseline.json").write_text(content)
            git("add", "baseline.json")
            git("commit", "-q", "-m", f"change {number}")
        return tmp_path / "baseline.json"

    return commit


def test_exact_figures_change_where_they_differ(repository: Any, fsdpbench: Call, tmp_path: Path) -> None:
    times = [0.2, 0.2 * (1 + 1e-15), 0.3, 0.25]
    contents = [
        json.dumps(baseline([{"step_time_s": time, "kernels": n}])) for n, time in enumerate(times, 50)
    ]
    contents.insert(1, "{broken")
    page = tmp_path / "history.html"
    done = fsdpbench("check", "--history", "--baseline", str(repository(contents)), "-o", str(page), "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [commit["subject"] for commit in told["commits"]] == [
        "change 0",
        "change 2",
        "change 3",
        "change 4",
    ]
    steps = [step for step in told["steps"] if step["metric"] == "step_time_s"]
    assert [(step["before"], step["after"]) for step in steps] == [
        (pytest.approx(0.2), 0.3), (0.3, 0.25),
    ]  # fmt: skip
    assert [step["worse"] for step in steps] == [True, False]
    assert [step["revision"] for step in steps] == [each["revision"] for each in told["commits"][2:]]
    assert "is left out" in done.stderr
    text = page.read_text()
    drawn = re.findall(r'<script type="application/json" id="figure-[^"]*">(.*?)</script>', text)
    assert len(drawn) == len({step["metric"] for step in told["steps"]})
    assert "+50 %" in text
    assert "−17 %" in text


def test_the_words_and_what_is_no_history(
    repository: Any, fsdpbench: Call, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = repository([json.dumps(baseline([{"step_time_s": time}])) for time in (0.2, 0.1)])
    done = fsdpbench("check", "--history", "--baseline", str(path))
    assert "better  step_time_s               −50 %, 1 configuration" in done.stdout
    outside = tmp_path_factory.mktemp("outside") / "baseline.json"
    outside.write_text(path.read_text())
    (tmp_path / "other.json").write_text(path.read_text())
    for words, told in (
        (["--baseline", str(outside)], "git"),
        (["--baseline", str(tmp_path / "other.json")], "git knows no commit of it"),
        ([], "--history needs --baseline"),
        (["--baseline", str(path), "--noise"], "without --noise"),
    ):
        done = fsdpbench("check", "--history", *words)
        assert done.returncode == 2, done.stderr
        assert told in done.stderr.splitlines()[-1]


def test_planted_steps_of_noisy_figures() -> None:
    random = np.random.default_rng(7)
    level = np.repeat([10.0, 10.5, 9.5], [20, 15, 12])
    found = measured_steps(list(level + random.normal(0, 0.1, len(level))))
    assert len(found) == 2
    assert abs(found[0] - 20) <= 1
    assert abs(found[1] - 35) <= 1
    assert measured_steps([1.0] * 20) == []
    assert measured_steps([1.0, 2.0]) == []
    assert exact_steps([1.0, 1.0, 2.0, 2.0 * (1 + 1e-15)]) == [2]
    assert exact_steps([0.0, 0.0, 1.0, 0.0]) == [2, 3]


@pytest.mark.campaign
def test_noise_alone_is_rarely_a_step() -> None:
    random = np.random.default_rng(3)
    alarms = sum(bool(measured_steps(list(random.normal(10, 0.2, 30)))) for _ in range(400))
    assert alarms <= 36  # 20 expected at a level of 5 %; more come once in ten thousand
