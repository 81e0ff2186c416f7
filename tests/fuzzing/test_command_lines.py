"""Whatever the words of a command are: an answer, or one line that says what is wrong, and its exit code."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from campaign import Campaign
from command_lines import command_line
from forked_commands import CommandServer, violations
from workshop import TINY, furnish

CASES = 500
REFUSED: tuple[tuple[tuple[str, ...], str], ...] = (
    (("run", *TINY, "--timeout", "nan"), "--timeout"),
    (("run", *TINY, "--wrap", "size:inf"), "size:inf"),
    (("run", *TINY, "--gpus", "1000000000"), "--gpus"),
    (("run", *TINY, "--gpus-per-node", "0"), "--gpus-per-node"),
    (("run", *TINY, "--seed", "18446744073709551615"), "seed"),
    (("run", *TINY, "--set", "seq=" + "9" * 5000), "seq"),
    (("run", *TINY, "--hardware", "x" * 1_000_000), "unknown hardware"),
    (("run", "--model", "gpt\x1b[31m"), r"gpt\x1b[31m"),
    (("run", "--nope"), "--nope"),
    (("plan", *TINY, "--when", 'a=" => batch=1'), "No closing quotation"),
    (("plan", *TINY, "--when", "gpus=x => batch=1"), "gpus=x"),
    (("sweep", *TINY, "--launcher", "slurm", "--partition", "a\n#SBATCH --wrap=x"), "--partition"),
    (("report", "n" * 5000), "no possible path"),
    (("tune", *TINY, "--real-time", "nan"), "--real-time"),
)


def test_hostile_words_are_refused_by_name(commands: CommandServer, tmp_path: Path) -> None:
    for words, named in REFUSED:
        outcome = commands.run_case(words, tmp_path)
        assert (outcome.code, violations(outcome)) == (2, []), outcome
        assert named in outcome.err, outcome


@pytest.mark.campaign
@pytest.mark.timeout(7200)
def test_five_hundred_command_lines(commands: CommandServer, tmp_path: Path) -> None:
    furnish(tmp_path / "model", commands)
    campaign = Campaign()
    for seed in range(CASES):
        folder = tmp_path / "case"
        shutil.copytree(tmp_path / "model", folder)
        words = command_line(random.Random(seed))
        campaign.judge(f"seed {seed}", commands.run_case(words, folder, timeout=60))
        shutil.rmtree(folder)
    campaign.check()
