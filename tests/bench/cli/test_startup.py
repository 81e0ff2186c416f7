"""Where a command finds itself: a locale of ASCII, a folder that is gone, a stream that nobody reads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fsdpbench.base.errors import BenchError
from fsdpbench.cli.startup import standard_stream

PROGRAM = "from fsdpbench.cli import main; main()"


def test_a_locale_of_ascii_reads_and_says_other_letters(tmp_path: Path) -> None:
    folder = tmp_path / "ä"
    folder.mkdir()
    (folder / "sweep.toml").write_text('model = "ä"\npoints = []\n', encoding="utf-8")
    ascii_only = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "baseline", "create", "ä", "ö.json"],
        cwd=tmp_path, env={**os.environ, **ascii_only}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode in (2, 3)
    assert done.stderr.startswith("fsdpbench: \\xe4")
    assert len(done.stderr.splitlines()) == 1


def test_a_folder_that_was_removed_is_said_in_one_line(tmp_path: Path) -> None:
    command = f"mkdir gone; cd gone; rmdir ../gone; {sys.executable} -c '{PROGRAM}' run --model gpt-tiny"
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 5
    assert done.stderr == "fsdpbench: the folder it was started in was removed; change to another\n"


def test_a_closed_output_is_none_of_the_commands_business(tmp_path: Path) -> None:
    command = f"{sys.executable} -c '{PROGRAM}' --version >&- 2>&-"
    assert subprocess.run(["sh", "-c", command], cwd=tmp_path).returncode == 0


def test_a_reader_that_went_away_changes_no_exit_code() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    stream = standard_stream(writing, None)
    print("a" * 100_000, file=stream, flush=True)
    print("and more", file=stream, flush=True)
    os.close(writing)


def test_an_output_that_cannot_be_written_is_told() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    stream = standard_stream(full, None)
    with pytest.raises(BenchError, match=r"standard output: cannot be written \(No space left"):
        print("lost", file=stream, flush=True)
    stream.flush()  # said once
    os.close(full)
