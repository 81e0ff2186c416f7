"""`fsdpbench tune` from end to end: front, TOML that runs again, code; a second start knows it all."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

PROGRAM = "from fsdpbench.cli import main; main()"
TUNE = [
    "tune",
    "--model",
    "gpt-125m",
    "--shape",
    "layers=2",
    "--gpus",
    "8",
    "--device",
    "sim",
    "--memory",
    "40GB",
]
SMALL = [
    "--batch",
    "1,4,4000",
    "--backward-prefetch",
    "pre,none",
    "--strategy",
    "FULL_SHARD",
    "--wrap",
    "block",
]
REST = ["--activation-checkpointing", "none", "--forward-prefetch", "0", "--limit-all-gathers", "2,off"]


def fsdpbench(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, timeout=250
    )


def test_it_leaves_the_front_and_the_best_and_knows_what_it_tried(tmp_path: Path) -> None:
    folder = tmp_path / "tuned"
    words = [*TUNE, *SMALL, *REST, "--backward-prefetch-depth", "1", "--trials", "8", "--finalists", "3"]
    done = fsdpbench(*words, "--system", "impl-fsdp1", "--json", "-o", str(folder))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["points"] == 12
    assert found["tried"] == 8
    speeds = [each["speed"] for each in found["front"]]
    assert speeds == sorted(speeds, reverse=True)
    assert all(each["peak_reserved_bytes"] <= 40 * 10**9 for each in found["front"])
    assert (folder / "report.html").is_file()
    best = tomllib.loads((folder / "best.toml").read_text())
    assert best["settings"]["batch"] in (1, 4)
    assert {path.name for path in folder.glob("best_*.py")} == {
        f"best_{api}_fsdp{generation}.py" for api in ("impl", "torch") for generation in (1, 2)
    }
    again = fsdpbench(*words, "--system", "impl-fsdp1", "--json", "-o", str(folder))
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout) == found
    assert "done already" in again.stderr
    planned = fsdpbench("plan", str(folder / "best.toml"), "--no-predict", "--json")
    assert [point["name"] for point in json.loads(planned.stdout)["points"]] == [found["best"]]


def test_nothing_that_fits_is_said(tmp_path: Path) -> None:
    words = ["--batch", "4", "--trials", "3", "--max-points", "2", "-o", str(tmp_path / "tuned")]
    done = fsdpbench(*TUNE, *words, "--memory", "10MB")
    assert done.returncode == 5
    assert "fits into 0.01 GB; the least needs" in done.stderr.splitlines()[-1]
