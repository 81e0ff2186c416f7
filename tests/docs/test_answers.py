"""The commands of the pages on answers run, and print what the pages show."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from fsdpbench.cli import main

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("out-of-memory", "which-settings")


def commands(page: str) -> list[str]:
    blocks = re.findall(
        r"^```\n(fsdpbench [^`]*?)\n```$", (ROOT / "docs" / f"{page}.md").read_text(), re.MULTILINE
    )
    return [line for block in blocks for line in block.splitlines()]


CASES = [command for page in PAGES for command in commands(page)]
SHOWN = {
    "explain docs/examples/oom.txt": ["fragmentation: 9.11 GiB", "train.py:61"],
    "explain --model": [
        "Memory runs out in step 1, phase forward, in blocks.19.feed_forward.up",
        "--batch 6 --grad-accum 4",
    ],
    "plan --model gpt-tiny --gpus 8 ": ["4 configurations, eager, 0 cannot fit"],
    "plan --model gpt-tiny --gpus 8,16": ["GPU-hours", "cost"],
}


@pytest.mark.plain_cases("oom.txt")
@pytest.mark.parametrize("command", CASES)
def test_a_command_of_the_pages_runs(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", shlex.split(command))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    output = capsys.readouterr().out
    (wanted,) = [words for start, words in SHOWN.items() if command.startswith(f"fsdpbench {start}")]
    assert all(words in output for words in wanted), output


def test_every_command_is_one_that_is_checked() -> None:
    assert len(CASES) == len(SHOWN)
