"""One sweep at a time in a folder that several machines see: the dead are found, the living left alone."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fsdpbench.base.errors import BenchError, UsageError
from fsdpbench.base.files import folder_lock
from fsdpbench.base.files.folder_lock import FolderLock, FolderTakenError

BEAT_S, SILENCE_S = 0.05, 0.8
HOLDER = """
import socket, sys, time
from pathlib import Path
socket.gethostname = lambda: "elsewhere"
from fsdpbench.base.files.folder_lock import FolderLock
lock = FolderLock(Path(sys.argv[1]), beat_s=0.05)
with lock.held():
    print("held", flush=True)
    while not lock.lost:
        time.sleep(0.02)
    try:
        lock.check()
    except Exception as error:
        print(type(error).__name__, error, flush=True)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / ".lock"


def lock(path: Path) -> FolderLock:
    return FolderLock(path, beat_s=BEAT_S, silence_s=SILENCE_S)


def write(path: Path, **changed: object) -> None:
    """A lock as another machine leaves it."""
    content = {"pid": 1, "host": "elsewhere", "began": None, "token": "theirs", "beat_s": BEAT_S}
    path.write_text(json.dumps({**content, **changed}))


def test_a_holder_elsewhere_is_respected_alive_and_replaced_dead(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        time.sleep(1.5 * SILENCE_S)  # its beat goes on for longer than a dead one's silence
        with pytest.raises(UsageError, match=f"process {holder.pid} on elsewhere"), lock(path).held():
            pass
        assert lock(path).is_held
        holder.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 20
        while lock(path).is_held:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        with lock(path).held():
            assert f"the lock of process {holder.pid} on elsewhere is broken" in capsys.readouterr().err
            holder.send_signal(signal.SIGCONT)
            told, _ = holder.communicate(timeout=20)
            assert told.startswith(b"BenchError")
            assert b"another sweep took over" in told
            assert path.exists(), "the one that lost it must not remove the new one's lock"
    assert os.listdir(path.parent) == []


@pytest.mark.parametrize("age_s", [0.0, 60.0, -3600.0])
def test_ages_are_the_file_systems_own(path: Path, age_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine's clock may be a day off: the lock's time counts beside that of a file made now."""
    write(path, beat_s=10.0)
    probe = path.with_name("probe")
    probe.touch()
    now = probe.stat().st_mtime
    probe.unlink()
    os.utime(path, (now - age_s, now - age_s))
    monkeypatch.setattr(time, "time", lambda: now + 86400.0)
    with pytest.raises(UsageError, match="another sweep is running"), FolderLock(path).held():
        pass
    os.utime(path, (now - 300.0, now - 300.0))
    with FolderLock(path).held():
        assert json.loads(path.read_text())["pid"] == os.getpid()


def test_a_lock_that_promises_no_beat_is_never_broken(path: Path) -> None:
    content = '{"pid": 1, "host": "elsewhere", "began": null}'
    path.write_text(content)
    os.utime(path, (0, 0))
    with pytest.raises(UsageError, match="remove"), lock(path).held():
        pass
    assert path.read_text() == content


def test_a_sweep_whose_lock_was_taken_over_writes_nothing_more(path: Path) -> None:
    mine = lock(path)
    with mine.held():
        mine.check()
        write(path)
        deadline = time.monotonic() + 10
        while not mine.lost:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with pytest.raises(BenchError, match="took over"):
            mine.check()
    assert json.loads(path.read_text())["token"] == "theirs"


def test_of_two_that_break_a_dead_lock_one_gets_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second has judged the dead one's lock when the first has put its own there."""
    write(path)
    os.utime(path, (0, 0))
    rename = os.rename

    def late(old: Path, new: Path) -> None:
        write(path, token="first", pid=7)
        rename(old, new)

    monkeypatch.setattr(os, "rename", late)
    with pytest.raises(UsageError, match="process 7 on elsewhere"), FolderLock(path).held():
        pass
    assert json.loads(path.read_text())["token"] == "first"
    assert os.listdir(path.parent) == [".lock"]


@pytest.mark.parametrize("content", [b"", b"[]", b'{"pid": 1, "ho', b"\xff\xfe", b'{"pid": -1, "host": "a"}'])
def test_a_lock_without_an_owner_is_broken(
    path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_lock, "SECOND_LOOK_S", 0.01)
    path.write_bytes(content)
    with lock(path).held():
        assert json.loads(path.read_text())["pid"] == os.getpid()
    assert os.listdir(path.parent) == []


def test_a_number_that_another_process_has_now_is_no_owner(path: Path) -> None:
    write(path, host=socket.gethostname(), pid=os.getpid(), began="1")
    with lock(path).held():
        pass


def test_a_process_of_another_container_is_not_looked_for_here(path: Path) -> None:
    """It has this host's name, and numbers of its own."""
    write(path, host=socket.gethostname(), pid=2**22, place="the same machine, pid:[1]")
    with pytest.raises(UsageError, match="another sweep is running"), lock(path).held():
        pass


def test_what_is_no_file_is_left_alone(path: Path) -> None:
    path.mkdir()
    with pytest.raises(UsageError, match=r"is a folder .*remove") as refused, lock(path).held():
        pass
    assert not isinstance(refused.value, FolderTakenError), "no process holds it: waiting would not end"
    assert path.is_dir()


@pytest.mark.parametrize("target", [".lock", "folder", "nothing"])
def test_a_link_is_not_a_lock(path: Path, target: str) -> None:
    (path.parent / "folder").mkdir()
    path.symlink_to(target)
    with lock(path).held():
        assert not path.is_symlink()
    assert os.listdir(path.parent) == ["folder"]


def test_of_many_that_find_a_dead_lock_one_at_a_time_gets_in(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_lock, "SECOND_LOOK_S", 0.01)
    inside = path.with_name("inside")

    def enter(_: int) -> int:
        try:
            with lock(path).held():
                os.close(os.open(inside, os.O_CREAT | os.O_EXCL))  # fails where another is in
                path.write_bytes(b"")  # and leave a lock that names nobody
                inside.unlink()
                return 1
        except UsageError:
            return 0

    with ThreadPoolExecutor(6) as pool:
        assert sum(pool.map(enter, range(12))) >= 1


def test_a_folder_that_was_removed_is_told_so(path: Path) -> None:
    mine = lock(path)
    with mine.held():
        path.unlink()
        deadline = time.monotonic() + 10
        while not mine.lost:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with pytest.raises(BenchError, match="was removed"):
            mine.check()
