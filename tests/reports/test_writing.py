"""What is no file is written into, and a pipe that nobody reads is an error instead of a wait without end."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from fsdpbench.reports import writing
from fsdpbench.reports.writing import is_written_into, write_into

LONG = b"x" * 300_000  # more than a pipe holds


def test_what_is_replaced_and_what_is_not(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("nothing")
    (tmp_path / "file").touch()
    names = ("pipe", "link", "file", "missing")
    assert [is_written_into(tmp_path / name) for name in names] == [True, True, False, False]
    write_into(tmp_path / "link", b"made")
    assert (tmp_path / "nothing").read_bytes() == b"made"
    write_into(tmp_path / "link", b"new")
    assert (tmp_path / "nothing").read_bytes() == b"new"
    write_into(Path("/dev/null"), LONG)


@pytest.mark.timeout(20)
def test_a_pipe_that_nobody_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "_READER_PATIENCE_S", 0.1)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="no process reads this pipe"):
        write_into(tmp_path / "pipe", b"told")


@pytest.mark.timeout(20)
def test_a_reader_may_come_late_and_take_its_time(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    read: list[bytes] = []

    def reader() -> None:
        time.sleep(0.2)
        with (tmp_path / "pipe").open("rb") as pipe:
            time.sleep(0.2)
            read.append(pipe.read())

    thread = threading.Thread(target=reader)
    thread.start()
    write_into(tmp_path / "pipe", LONG)
    thread.join()
    assert read == [LONG]
