"""What processes of a sweep leave for each other: whole records, in order, and nothing of it is needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fsdpbench.base.files import shared_log
from fsdpbench.base.files.shared_log import SharedLog, add_record, records

WRITER = """
import sys
from fsdpbench.base.files.shared_log import add_record
for number in range(200):
    add_record(sys.argv[1], (sys.argv[2] * (number * 37 % 5000)).encode())
"""


def test_records_come_back_in_order() -> None:
    with SharedLog() as log:
        assert log.path is not None
        assert records(log.path) == []
        for record in (b"first", b"", b"third" * 100_000):
            add_record(log.path, record)
        assert records(log.path) == [b"first", b"", b"third" * 100_000]


def test_other_processes_write_whole_records_at_once() -> None:
    with SharedLog() as log:
        assert log.path is not None
        writers = [subprocess.Popen([sys.executable, "-c", WRITER, log.path, name]) for name in "abc"]
        assert [writer.wait() for writer in writers] == [0, 0, 0]
        found = records(log.path)
    wanted = [(name * (number * 37 % 5000)).encode() for name in "abc" for number in range(200)]
    assert sorted(found) == sorted(wanted)


def test_it_is_gone_with_its_maker_and_then_empty() -> None:
    with SharedLog() as log:
        path = log.path
    assert path is not None
    assert log.path is None
    assert records(path) == []
    add_record(path, b"for no reader")
    assert records(path) == []


def test_it_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_log, "MOST_BYTES", 120)
    with SharedLog() as log:
        assert log.path is not None
        for _ in range(3):
            add_record(log.path, b"x" * 50)
        assert records(log.path) == [b"x" * 50, b"x" * 50]


def test_a_record_that_was_cut_off_loses_no_other(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"")
    add_record(str(path), b"whole")
    add_record(str(path), b"never written to its end")
    os.truncate(path, path.stat().st_size - 3)
    assert records(str(path)) == [b"whole"]
