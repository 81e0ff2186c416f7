"""Whatever a file holds that a command reads: an answer, or one line that names the file."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from damage import damaged
from forked_commands import CommandServer
from fuzz_count import FuzzCount

CASES_A_PART = 20
READERS: dict[str, tuple[tuple[str, ...], ...]] = {
    "space.toml": (
        ("plan", "space.toml", "--no-predict"),
        ("sweep", "space.toml", "-o", "new", "--timeout", "10"),
        ("tune", "space.toml", "-o", "new", "--timeout", "10", "--trials", "1", "--finalists", "1"),
    ),
    "profile.toml": (
        ("plan", "space.toml", "--hardware", "profile.toml", "--no-predict"),
        ("run", "--model", "gpt-125m", "--hardware", "profile.toml", "--timeout", "10"),
    ),
    "thresholds.toml": (("check", "run", "--baseline", "baseline.json", "--thresholds", "thresholds.toml"),),
    "baseline.json": (
        ("check", "run", "--baseline", "baseline.json"),
        ("compare", "baseline.json", "run", "--format", "md"),
        ("check", "--baseline", "baseline.json"),
        ("baseline", "update", "baseline.json"),
    ),
    "result.json": (("compare", "result.json", "point"), ("compare", "point", "result.json", "--json")),
    "run/sweep.toml": (
        ("report", "run", "--format", "md"),
        ("check", "run", "--baseline", "baseline.json"),
        ("baseline", "create", "run", "new.json"),
    ),
}


@pytest.mark.campaign
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(20))
def test_damaged_files_are_answered(
    commands: CommandServer, furnished: Path, tmp_path: Path, part: int
) -> None:
    count = FuzzCount()
    for seed in range(CASES_A_PART * part, CASES_A_PART * (part + 1)):
        random_ = random.Random(seed)
        folder = tmp_path / "case"
        shutil.copytree(furnished, folder)
        name = random_.choice(list(READERS))
        (folder / name).write_bytes(damaged(folder / name, random_))
        count.judge(f"seed {seed}", commands.run_case(random_.choice(READERS[name]), folder, timeout=60))
        shutil.rmtree(folder)
    count.check()
