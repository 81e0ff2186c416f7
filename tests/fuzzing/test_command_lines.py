"""Whatever the words of a command are: an answer, or one line that says what is wrong, and its exit code."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from command_lines import command_line
from forked_commands import CommandServer
from fuzz_count import FuzzCount

CASES_A_PART = 20


@pytest.mark.campaign
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(25))
def test_command_lines_of_any_words(
    commands: CommandServer, furnished: Path, tmp_path: Path, part: int
) -> None:
    count = FuzzCount()
    for seed in range(CASES_A_PART * part, CASES_A_PART * (part + 1)):
        folder = tmp_path / "case"
        shutil.copytree(furnished, folder)
        words = command_line(random.Random(seed))
        count.judge(f"seed {seed}", commands.run_case(words, folder, timeout=60))
        shutil.rmtree(folder)
    count.check()
