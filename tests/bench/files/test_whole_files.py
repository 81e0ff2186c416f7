"""Files that several write at once: each is whole, none is in the way of another, nothing is left behind."""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fsdpbench.base import writing
from fsdpbench.base.writing import clear_leftovers, move_new, write_new, write_whole


def test_of_many_writers_the_last_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    texts = [letter * 200_000 for letter in "abcd"]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda text: write_whole(path, text), texts * 5))
    assert path.read_text() in texts
    assert os.listdir(tmp_path) == ["report.html"]


@pytest.mark.parametrize("links", [True, False])
def test_of_many_that_make_a_file_one_does(
    tmp_path: Path, links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*names: object) -> None:
        raise PermissionError(1, "this file system has no links")

    if not links:
        monkeypatch.setattr(writing.os, "link", refused)

    def made(text: str) -> bool:
        try:
            write_new(tmp_path / "lock", text.encode())
        except FileExistsError:
            return False
        return True

    with ThreadPoolExecutor(4) as pool:
        won = list(pool.map(made, "abcdefgh"))
    assert won.count(True) == 1
    assert (tmp_path / "lock").read_text() == "abcdefgh"[won.index(True)]
    assert os.listdir(tmp_path) == ["lock"]


def test_what_cannot_replace_a_folder_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "name").mkdir()
    for write in (write_whole, write_new):
        with pytest.raises(OSError, match="name"):
            write(tmp_path / "name", b"text")
    (tmp_path / "source").touch()
    with pytest.raises(FileExistsError):
        move_new(tmp_path / "source", tmp_path / "name")
    assert sorted(os.listdir(tmp_path)) == ["name", "source"]


def test_only_what_killed_writers_left_is_cleared(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    host = socket.gethostname()
    names = {
        f".sweep.toml.ab.{child}@{host}.partial": False,
        f".report.html.{child}.tmp": False,
        f".sweep.toml.ab.{os.getpid()}@{host}.partial": True,
        f".sweep.toml.ab.{child}@elsewhere.partial": True,
        ".bashrc": True,
    }
    for name in names:
        (tmp_path / name).touch()
    clear_leftovers(tmp_path)
    assert set(os.listdir(tmp_path)) == {name for name, stays in names.items() if stays}


def test_text_that_utf8_cannot_say_is_written_escaped(tmp_path: Path) -> None:
    write_whole(tmp_path / "a", "ä \udcff")
    assert (tmp_path / "a").read_bytes() == "ä \\udcff".encode()


@pytest.mark.timeout(20)
def test_a_pipe_that_nobody_reads_is_no_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "_READER_PATIENCE_S", 0.1)
    os.mkfifo(tmp_path / "results.sqlite")
    with pytest.raises(OSError, match="no process reads this pipe"):
        write_whole(tmp_path / "results.sqlite", "told")
    assert os.listdir(tmp_path) == ["results.sqlite"]
