"""How many processes read traces: bounded by files, processors and memory."""

from __future__ import annotations

import os
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


def test_processors_bound_it(traces: list[Path]) -> None:
    assert suitable_processes(traces, processors=4, memory=1000 * GIB) == 4
    assert suitable_processes(traces, processors=64, memory=1000 * GIB) == 8


def test_memory_bounds_it(traces: list[Path]) -> None:
    """Each takes 3.2 GiB."""
    assert suitable_processes(traces, processors=8, memory=10 * GIB) == 3
    assert suitable_processes(traces, processors=8, memory=GIB) == 1


def test_packed_files_count_as_what_they_unpack_to(tmp_path: Path) -> None:
    files = [tmp_path / f"rank{rank}_trace.json.gz" for rank in range(4)]
    for file in files:
        file.write_bytes(b"\x1f\x8b")
        os.truncate(file, GIB // 15)
    assert suitable_processes(files, processors=8, memory=10 * GIB) == 3


def test_little_is_read_here(tmp_path: Path, traces: list[Path]) -> None:
    small = [tmp_path / "a.json", tmp_path / "b.json"]
    for file in small:
        file.write_text("{}")
    assert suitable_processes(small, processors=8) == 1
    assert suitable_processes(traces[:1], processors=8) == 1


def test_free_memory_is_told_in_bytes() -> None:
    assert 1 << 20 < free_memory() < 1 << 50
