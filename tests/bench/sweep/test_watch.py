"""`fsdpbench watch`: it ends by itself, however the sweep does, and says which way."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fsdpbench.base.files.folder_lock import FolderLock
from fsdpbench.cli.commands import pages
from fsdpbench.sweep.sweep_state import SweepFolder, point_name

Call = Callable[..., subprocess.CompletedProcess[str]]
POINTS = ("first-0000000a", "second-0000000b")
FIGURES = {"status": "ok", "device": "sim", "step_time_s": 0.25, "tokens_per_s_per_gpu": 1000.0}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_LOOK_S", 0.02)
    monkeypatch.setattr(pages, "_GRACE_S", 0.1)


@pytest.fixture
def in_background() -> Iterator[Callable[[Callable[[], None]], None]]:
    """Runs something beside the test, to its end."""
    threads: list[threading.Thread] = []

    def run(what: Callable[[], None]) -> None:
        threads.append(threading.Thread(target=what))
        threads[-1].start()

    yield run
    for thread in threads:
        thread.join()


def begin(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "sweep.toml").write_text(f"points = {json.dumps(POINTS)}\n")


def finish(folder: Path, point: str, **figures: Any) -> None:
    work = folder / f".work-{point}"
    work.mkdir()
    (work / "config.json").write_text(json.dumps({"name": point_name(point), "key": point[-8:]}))
    (work / "result.json").write_text(json.dumps({**FIGURES, **figures}))
    os.rename(work, folder / point)


def test_a_sweep_that_is_over(fsdpbench: Call, tmp_path: Path) -> None:
    begin(tmp_path)
    for point in POINTS:
        finish(tmp_path, point)
    done = fsdpbench("watch", str(tmp_path))
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "2/2 configurations")
    page = (tmp_path / "report.html").read_text()
    assert 'http-equiv="refresh"' not in page
    finish(tmp_path / "..", "third-0000000c", status="crash", step_time_s=None)
    os.replace(tmp_path.parent / "third-0000000c/result.json", tmp_path / POINTS[1] / "result.json")
    done = fsdpbench("watch", str(tmp_path), "--no-page", "--json")
    assert done.returncode == 4
    assert json.loads(done.stdout)["failed"] == 1
    assert done.stderr == ""


def test_one_that_begins_later_and_ends_well(
    fsdpbench: Call, tmp_path: Path, in_background: Callable[..., None]
) -> None:
    """Each result once, on a line of its own; the page loads itself again until the end."""
    folder, seen = tmp_path / "later", []

    def sweep() -> None:
        time.sleep(0.1)
        folder.mkdir()
        with FolderLock(folder / ".lock").held():
            begin(folder)
            finish(folder, POINTS[0])
            while not (folder / "report.html").exists():
                time.sleep(0.01)
            seen.append((folder / "report.html").read_text())
            finish(folder, POINTS[1], tokens_per_s_per_gpu=2000.0, compiled=True)

    in_background(sweep)
    done = fsdpbench("watch", str(folder))
    assert done.returncode == 0, done.stderr
    assert 'http-equiv="refresh"' in seen[0]
    assert 'http-equiv="refresh"' not in (folder / "report.html").read_text()
    lines = done.stderr.splitlines()
    assert lines[0] == f"waiting for a sweep in {folder}"
    assert sum("second: 250.0 ms a step" in line for line in lines) == 1
    best = "best so far: 2,000 tokens/s/GPU, compiled, second"
    assert done.stdout.splitlines() == ["2/2 configurations", best]


def test_one_that_dies_and_one_that_outlasts_the_watcher(
    fsdpbench: Call, tmp_path: Path, in_background: Callable[..., None]
) -> None:
    begin(tmp_path)
    let_go = threading.Event()

    def sweep() -> None:
        with FolderLock(tmp_path / ".lock").held():
            finish(tmp_path, POINTS[0])
            let_go.wait(20)

    in_background(sweep)
    while not (tmp_path / ".lock").exists():
        time.sleep(0.01)
    done = fsdpbench("watch", str(tmp_path), "--timeout", "0.3", "--no-page")
    assert done.returncode == 3
    assert done.stdout.startswith("1/2 configurations")
    threading.Timer(0.2, let_go.set).start()
    done = fsdpbench("watch", str(tmp_path), "--no-page")
    assert done.returncode == 5
    assert "the sweep ended with 1 of 2 configurations done" in done.stderr.splitlines()[-1]


def test_nothing_to_watch(fsdpbench: Call, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for words, code, told in (
        ((tmp_path / "nowhere", "--wait", "0.05"), 2, "does not exist"),
        ((tmp_path, "--wait", "0.05"), 2, "is not a sweep's folder"),
        ((file,), 2, "is a file"),
        ((tmp_path, "--wait", "0"), 2, "--wait"),
        ((tmp_path, "--timeout", "0.05"), 3, "no sweep began"),
    ):
        done = fsdpbench("watch", *map(str, words), "--no-page")
        assert done.returncode == code, done.stderr
        assert told in done.stderr.splitlines()[-1]
    begin(tmp_path)
    done = fsdpbench("watch", str(tmp_path), "--wait", "0.05", "--no-page")
    assert done.returncode == 5
    assert "no sweep runs there" in done.stderr


def test_what_is_half_there_counts_at_the_next_look(tmp_path: Path) -> None:
    watched = SweepFolder(tmp_path)
    (tmp_path / "sweep.toml").write_text("points = [")
    assert watched.look() is None
    begin(tmp_path)
    finish(tmp_path, POINTS[0])
    (tmp_path / POINTS[1]).mkdir()
    (tmp_path / POINTS[1] / "result.json").write_text('{"status": "o')
    state = watched.look()
    assert state is not None
    assert [each.name for each in state.ended] == ["first"]
    (tmp_path / POINTS[1] / "result.json").write_text('{"status": "oom"}')
    state = watched.look()
    assert state is not None
    assert state.is_done
    assert state.failed == 0
