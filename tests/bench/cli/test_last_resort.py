"""An exception that nobody foresaw: exit code 5, one line, and a file with the traceback."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from fsdpbench.cli import group
from fsdpbench.cli.commands import list as list_command

Called = Callable[..., CompletedProcess[str]]


def broken() -> None:
    raise KeyError("a\x1b[31m key\nof two lines")


def test_it_ends_with_5_and_one_line_that_names_the_file(
    monkeypatch: pytest.MonkeyPatch, fsdpbench: Called, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(list_command.command, "callback", lambda **_: broken())
    done = fsdpbench("list", "models")
    assert done.returncode == 5
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "\x1b" not in done.stderr
    (file,) = tmp_path.iterdir()
    assert str(file) in done.stderr
    assert re.search(r"KeyError.*test_last_resort\.py:\d+", done.stderr)
    written = file.read_text()
    assert "Traceback (most recent call last)" in written
    assert "in broken" in written


def test_where_nothing_can_be_written_the_line_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    try:
        broken()
    except KeyError as error:
        line = group.crash_line(error)
    assert "cannot be written" in line
    assert "KeyError" in line
