"""How many processes read traces: bounded by files, processors and memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdpbench.reports.analysis.processes import free_memory, suitable_processes

GIB = 1 << 30


@pytest.fixture
def traces(tmp_path: Path) -> list[Path]:
    """Eight files that pretend to be 1 GiB each (sparse)."""
    files = [tmp_path / f"rank{rank}_trace.json" for rank in range(8)]
    for file in files:
        file.touch()
        os.truncate(file, GIB)
    return files


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """How many read some files with so many processors, in so many GiB."""

    def of(files: list[Path], processors: int, gib: int = 1000) -> int:
        monkeypatch.setattr("os.sched_getaffinity", lambda process: range(processors))
        monkeypatch.setattr("fsdpbench.reports.analysis.processes.free_memory", lambda: 2 * gib * GIB)
        return suitable_processes(files)

    return of


def test_processors_bound_it(traces: list[Path], processes: Callable[..., int]) -> None:
    assert processes(traces, 4, 1000) == 4
    assert processes(traces, 64, 1000) == 8


def test_memory_bounds_it(traces: list[Path], processes: Callable[..., int]) -> None:
    """Each takes 3.2 GiB."""
    assert processes(traces, 8, 10) == 3
    assert processes(traces, 8, 1) == 1


def test_packed_files_count_as_what_they_unpack_to(tmp_path: Path, processes: Callable[..., int]) -> None:
    files = [tmp_path / f"rank{rank}_trace.json.gz" for rank in range(4)]
    for file in files:
        file.write_bytes(b"\x1f\x8b")
        os.truncate(file, GIB // 15)
    assert processes(files, 8, 10) == 3


def test_little_is_read_here(tmp_path: Path, traces: list[Path], processes: Callable[..., int]) -> None:
    small = [tmp_path / "a.json", tmp_path / "b.json"]
    for file in small:
        file.write_text("{}")
    assert processes(small, 8) == 1
    assert processes(traces[:1], 8) == 1


def test_free_memory_is_told_in_bytes() -> None:
    assert 1 << 20 < free_memory() < 1 << 50
