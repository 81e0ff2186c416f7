"""Environments: what an interpreter holds, damaged ones, ones that another process makes."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest
from tiny_packages import environment

from fsdpbench.answers.upgrade import environments
from fsdpbench.answers.upgrade.environments import Cache, Environment, Wanted, differing, normalized
from fsdpbench.base.errors import CannotJudgeError
from fsdpbench.base.files.folder_lock import FolderLock


def ignore(line: str) -> None:
    pass


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(tmp_path_factory.mktemp("old"), ("tiny", "1.0", ""), shares=False)


def test_packages_of_an_interpreter_and_what_differs(
    python: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(environments, "_own_needs", lambda: ())
    found = Cache(tmp_path, ignore).environment(Wanted("from", python=python))
    assert found.packages == {"tiny": "tiny==1.0"}
    assert found.version.startswith("3.")
    newer = {"tiny": "tiny==2.0", "more": "more==1"}
    assert differing(found, Environment("x", "3.11.7", newer, {})) == {
        "more": (None, "more==1"),
        "tiny": ("tiny==1.0", "tiny==2.0"),
    }


def test_names_have_one_spelling() -> None:
    words = ("Hugging_Face.Hub>=1", "hugging-face-hub[extra]", "hugging-face-hub @ file:///x")
    assert {normalized(each) for each in words} == {"hugging-face-hub"}


def test_a_whole_environment_is_used_and_a_damaged_one_is_made_again(
    python: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(environments, "_own_needs", lambda: ())
    said: list[str] = []
    cache = Cache(tmp_path, said.append)
    wanted = Wanted("from", ("no-such-package-here==1",))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(environments.sys, "executable", "/no/python")
    with pytest.raises(CannotJudgeError, match="/no/python: cannot be started"):
        cache.environment(wanted)
    (lock,) = {each.name for each in tmp_path.iterdir()} or {""}
    assert lock == ""  # nothing half-made stays
    key = said[0].rpartition("/")[2]
    (tmp_path / key).symlink_to(python.parents[1])
    whole = environments._probed(str(tmp_path / key / "bin" / "python"))
    record = tmp_path / f"{key}.json"
    record.write_bytes(msgspec.json.encode(whole))
    assert cache.environment(wanted) == whole
    for damage in (b"{", msgspec.json.encode(Environment("x", "3.11.7", {}, {}))):
        (tmp_path / key).unlink(missing_ok=True)
        (tmp_path / key).symlink_to(python.parents[1])
        record.write_bytes(damage)
        with pytest.raises(CannotJudgeError):  # it is made again, by a Python that is not there
            cache.environment(wanted)
        assert not record.exists()


def test_another_process_that_makes_it_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(environments, "_own_needs", lambda: ())
    monkeypatch.setattr(environments.sys, "executable", "/no/python")
    said: list[str] = []
    wanted = Wanted("to", ("tiny==1",))
    with pytest.raises(CannotJudgeError):
        Cache(tmp_path, said.append).environment(wanted)
    lock = tmp_path / f"{said[0].rpartition('/')[2]}.lock"
    began = time.monotonic()
    with FolderLock(lock).held(), pytest.raises(CannotJudgeError, match=r"process \d+ on .* remove the file"):
        Cache(tmp_path, ignore, patience_s=0.1).environment(wanted)
    assert time.monotonic() - began < 60
