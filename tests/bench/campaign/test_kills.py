"""Killed ten times at random moments, a sweep ends with the results of one that was left alone."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

PROGRAM = "from fsdpbench.cli import main; main()"
SWEEP = ["sweep", "--model", "gpt-125m", "--shape", "layers=4", "--gpus", "8", "--device", "sim"]
SPACE = ["--system", "impl-fsdp2", "--batch", "1,2,4", "--wrap", "block,every-2"]
SPACE += ["--strategy", "FULL_SHARD,SHARD_GRAD_OP", "--reduce-dtype", "fp32,bf16"]
SPACE += ["--activation-checkpointing", "none,op,full"]
POINTS = 72
KILLS = 10


def start(folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", PROGRAM, *SWEEP, *SPACE, "-o", str(folder)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def finish(folder: Path) -> None:
    with start(folder) as process:
        _, stderr = process.communicate(timeout=900)
    assert process.returncode == 0, stderr.decode()


def results(folder: Path) -> dict[str, str]:
    """Each result as text, sorted, without dates and durations."""
    found: dict[str, str] = {}
    for path in sorted(folder.glob("impl-*/result.json")):
        result: dict[str, Any] = json.loads(path.read_text())
        result.pop("bench")
        found[path.parent.name] = json.dumps(result, sort_keys=True)
    return found


@pytest.mark.campaign
@pytest.mark.timeout(3000)
def test_ten_kills_change_nothing(tmp_path: Path) -> None:
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    finish(undisturbed)
    drawn, kept = random.Random(20), 0
    for _ in range(KILLS):
        with start(killed) as process:
            # From the first moment on: while it imports, between points, while it commits.
            time.sleep(drawn.uniform(0.2, 12.0))
            process.send_signal(signal.SIGKILL)
            process.communicate(timeout=60)
        wait_until_nothing_writes(killed)
        now = len(results(killed))
        assert now >= kept, "a finished configuration was lost"
        kept = now
    finish(killed)
    assert len(results(undisturbed)) == POINTS
    assert results(killed) == results(undisturbed)
    assert [path.name for path in killed.iterdir() if path.name.startswith(".")] == []


def wait_until_nothing_writes(folder: Path) -> None:
    deadline = time.monotonic() + 60
    while any(str(folder) in _open_files(pid) for pid in os.listdir("/proc") if pid.isdigit()):
        assert time.monotonic() < deadline, "processes of the killed sweep are left"
        time.sleep(0.1)


def _open_files(pid: str) -> str:
    try:
        return " ".join(os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd"))
    except OSError:
        return ""
