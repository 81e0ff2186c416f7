"""Runs whose files all stay in their folder: files from before stay, and the script sees what it wrote."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from fsdpbench.script.files import ScriptFiles


def test_all_that_a_script_writes_goes_into_the_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, run = tmp_path / "home", tmp_path / "run"
    home.mkdir()
    run.mkdir()
    for name in ("log.txt", "old.txt", "moved.txt"):
        (home / name).write_text("mine")
    monkeypatch.chdir(home)
    files = ScriptFiles(run, None, keeps_all=True)
    files.install()
    try:
        with open("log.txt", "a") as log:
            log.write(" and the script's")
        os.makedirs("new/inside")
        with pytest.raises(FileExistsError):
            os.mkdir("new")
        Path("new/inside/a.bin").write_bytes(b"\0")
        os.remove("old.txt")
        os.replace("moved.txt", "new/moved.txt")
        shutil.copy("log.txt", "new/log.txt")
        assert sorted(os.listdir(".")) == ["log.txt", "new"]
        assert sorted(os.listdir("new")) == ["inside", "log.txt", "moved.txt"]
        assert Path("new/log.txt").read_text() == "mine and the script's"
        shutil.rmtree("new/inside")
        assert not os.path.exists("new/inside")
    finally:
        files.settle()
    assert {each.name: each.read_text() for each in home.iterdir()} == {
        "log.txt": "mine", "old.txt": "mine", "moved.txt": "mine",
    }  # fmt: skip


def test_caches_that_c_code_writes_are_real_with_the_way_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first use of Hugging Face's libraries by this user: not even `~/.cache` is there."""
    monkeypatch.delenv("HF_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "run").mkdir()
    files = ScriptFiles(tmp_path / "run", None, keeps_all=True)
    files.install()
    cache = tmp_path / ".cache" / "huggingface"
    try:
        os.makedirs(tmp_path / ".cache" / "mine")
        os.mkdir(cache)
        (cache / "datasets").mkdir()
        assert sorted(os.listdir(tmp_path / ".cache")) == ["huggingface", "mine"]
    finally:
        files.settle()
    assert (cache / "datasets").is_dir()
    assert os.listdir(tmp_path / ".cache") == ["huggingface"]
