"""What is no file is written into, and a pipe that nobody reads is an error instead of a wait without end."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path

import pytest

from fsdpbench.base import writing
from fsdpbench.base.writing import append_to, create, is_written_into, remove, replacing, write_whole

LONG = b"x" * 300_000  # more than a pipe holds


def victim(folder: Path) -> Path:
    (folder / "outside").mkdir()
    (folder / "outside" / "victim").write_bytes(b"kept")
    return folder / "outside" / "victim"


def test_what_is_replaced_and_what_is_not(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("nothing")
    (tmp_path / "file").touch()
    names = ("pipe", "link", "file", "missing")
    assert [is_written_into(tmp_path / name) for name in names] == [True, False, False, False]
    for stream in ("/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", "/dev/null"):
        assert is_written_into(Path(stream))
    write_whole(Path("/dev/null"), LONG)


LINKS = {
    "a link": lambda path, outside: path.symlink_to(outside),
    "a hard link": lambda path, outside: os.link(outside, path),
    "a link to nothing": lambda path, outside: path.symlink_to(outside.parent / "nothing"),
    "a link to a folder": lambda path, outside: path.symlink_to(outside.parent),
    "a link to itself": lambda path, outside: path.symlink_to(path),
    "a link to a device": lambda path, outside: path.symlink_to("/dev/full"),
}


@pytest.mark.parametrize("kind", LINKS)
def test_nothing_is_written_through_a_link(tmp_path: Path, kind: str) -> None:
    outside = victim(tmp_path)
    for name in ("whole", "log", "removed"):
        LINKS[kind](tmp_path / name, outside)
    write_whole(tmp_path / "whole", b"new")
    os.write(handle := append_to(tmp_path / "log"), b"new")
    os.close(handle)
    remove(tmp_path / "removed")
    assert outside.read_bytes() == b"kept"
    assert os.listdir(outside.parent) == ["victim"]
    for name in ("whole", "log"):
        assert not (tmp_path / name).is_symlink()
        assert (tmp_path / name).read_bytes() == b"new"
    assert sorted(os.listdir(tmp_path)) == ["log", "outside", "whole"]


def test_a_log_is_added_to(tmp_path: Path) -> None:
    for text in (b"a", b"b"):
        os.write(handle := append_to(tmp_path / "log"), text)
        os.close(handle)
    assert (tmp_path / "log").read_bytes() == b"ab"
    os.mkfifo(tmp_path / "pipe")
    os.close(append_to(tmp_path / "pipe"))
    assert (tmp_path / "pipe").is_file()


def test_what_a_link_leads_to_is_not_removed(tmp_path: Path) -> None:
    outside = victim(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "link").symlink_to(outside.parent)
    (tmp_path / "link").symlink_to(outside.parent)
    remove(tmp_path / "folder")
    remove(tmp_path / "link")
    remove(tmp_path / "nothing")
    assert outside.exists()
    assert os.listdir(tmp_path) == ["outside"]


def test_a_file_that_failed_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    with contextlib.suppress(RuntimeError), replacing(tmp_path / "file") as aside, create(aside) as file:
        file.write(b"half")
        raise RuntimeError
    assert (tmp_path / "file").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.timeout(20)
def test_a_pipe_that_nobody_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "_READER_PATIENCE_S", 0.1)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="no process reads this pipe"):
        write_whole(tmp_path / "pipe", b"told")


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
    write_whole(tmp_path / "pipe", LONG)
    thread.join()
    assert read == [LONG]
