"""Whatever a file holds that a command reads: an answer, or one line that names the file."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from campaign import Campaign
from damage import damaged
from forked_commands import CommandServer, violations
from workshop import SPACE, furnish

CASES = 400
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
SPOILT: tuple[tuple[str, str, str], ...] = (
    ("space.toml", SPACE.replace("gpus_per_node = 2", "gpus_per_node = 0"), "gpus_per_node"),
    ("space.toml", SPACE.replace("gpus_per_node", "gpus_per_nod"), "Did you mean gpus_per_node"),
    ("space.toml", SPACE.replace("max_points = 1", "max_points = nan"), "max_points"),
    ("space.toml", SPACE.replace("[1, 2]", f"[{'9' * 5000}]"), "beyond 2^63-1"),
    ("space.toml", SPACE.replace('"gpt"', '"gpt\\u001b[31m"'), r"gpt\x1b[31m"),
    ("space.toml", "a = " + "[" * 5000, "nested"),
    ("profile.toml", 'base = "h100-80gb"\nname = "a"\n[memory]\ncapacity_gib = nan\n', "memory.capacity_gib"),
    ("profile.toml", 'base = "h100-80gb"\nname = "a"\ngpus_per_nod = 8\n', "did you mean gpus_per_node"),
    ("profile.toml", 'base = "h100-80gb"\nname = "a"\n[nic]\ngb_s_per_node = 1e300\n', "nic.gb_s_per_node"),
    ("profile.toml", 'base = "h100-80gb"\nname = "a"\ngpus_per_node = 0\n', "gpus_per_node = 0"),
)


def test_what_is_wrong_in_a_file_is_named(commands: CommandServer, tmp_path: Path) -> None:
    for name, content, named in SPOILT:
        (tmp_path / "space.toml").write_text(SPACE)
        (tmp_path / name).write_text(content)
        outcome = commands.run_case(READERS[name][0], tmp_path)
        assert (outcome.code, violations(outcome)) == (2, []), outcome
        assert named in outcome.err, outcome
        assert name in outcome.err, outcome


@pytest.mark.campaign
@pytest.mark.timeout(7200)
def test_four_hundred_damaged_files(commands: CommandServer, tmp_path: Path) -> None:
    furnish(tmp_path / "model", commands)
    campaign = Campaign()
    for seed in range(CASES):
        random_ = random.Random(seed)
        folder = tmp_path / "case"
        shutil.copytree(tmp_path / "model", folder)
        name = random_.choice(list(READERS))
        (folder / name).write_bytes(damaged(folder / name, random_))
        campaign.judge(f"seed {seed}", commands.run_case(random_.choice(READERS[name]), folder, timeout=60))
        shutil.rmtree(folder)
    campaign.check()
