"""Whatever the words of a command are: an answer, or one line that says what is wrong, and its exit code."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from command_lines import command_line
from forked_commands import CommandServer
from fuzz_count import FuzzCount
from workshop import furnish

CASES = 500


@pytest.mark.campaign
@pytest.mark.timeout(7200)
def test_five_hundred_command_lines(commands: CommandServer, tmp_path: Path) -> None:
    furnish(tmp_path / "model", commands)
    count = FuzzCount()
    for seed in range(CASES):
        folder = tmp_path / "case"
        shutil.copytree(tmp_path / "model", folder)
        words = command_line(random.Random(seed))
        count.judge(f"seed {seed}", commands.run_case(words, folder, timeout=60))
        shutil.rmtree(folder)
    count.check()
