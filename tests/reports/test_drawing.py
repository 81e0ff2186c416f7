"""Rows of the timeline and points of the memory curve: few enough to draw, true where they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fsdpbench.reports.analysis import analyze
from fsdpbench.reports.analysis.memory import memory_curve
from fsdpbench.reports.pages.timeline import Row, stream_rows
from fsdpbench.reports.readers import read_trace


def rows_of(built: Any, tmp_path: Path, **options: Any) -> list[Row]:
    path = built.write(tmp_path / "rank0_trace.json")
    return stream_rows(read_trace(path), analyze([path]).ranks[0].steps[0], **options)


def test_rows_of_a_step(tmp_path: Path, fsdp_trace: Any) -> None:
    rows = rows_of(fsdp_trace, tmp_path)
    assert [(row.label, row.kind) for row in rows] == [
        ("stream 7 (computation)", "stream"),
        ("stream 20 (communication)", "stream"),
        ("CPU phases", "annotation"),
        ("CPU thread 100: FSDP", "annotation"),
    ]
    compute, communication, phases, _ = rows
    assert [(bar.start, bar.duration, bar.name, bar.unit) for bar in compute.bars[:2]] == [
        (110_000, 190_000, "gemm_forward_0", "blocks.0"),
        (350_000, 150_000, "gemm_forward_1", "blocks.1"),
    ]
    assert [(bar.start, bar.category, bar.unit) for bar in communication.bars] == [
        (10_000, "communication", "blocks.0"),
        (150_000, "communication", "blocks.1"),
        (655_000, "communication", "blocks.1"),
        (855_000, "communication", "blocks.0"),
    ]
    assert [bar.name for bar in phases.bars] == ["forward", "backward", "optimizer"]


def test_thousands_of_kernels_become_few_bars(tmp_path: Path, trace_builder: Any) -> None:
    built = trace_builder()
    built.step(0, 1_000_000, 12_000_000)
    at = 1_010_000
    for number in range(3000):
        long = number % 1000 == 500
        built.kernel("long" if long else "short", at, at + (200_000 if long else 1_000), launch=1_000_500)
        at += 200_100 if long else 1_100
    (row,) = [row for row in rows_of(built, tmp_path, max_bars=50) if row.kind == "stream"]
    assert len(row.bars) <= 50
    assert sum(bar.count for bar in row.bars) == 3000
    assert sum(bar.name == "long" for bar in row.bars) == 3
    for before, after in zip(row.bars, row.bars[1:], strict=False):
        assert before.start + before.duration <= after.start


def test_work_across_the_edge_of_a_step_is_cut(tmp_path: Path, trace_builder: Any) -> None:
    built = trace_builder()
    built.step(0, 1_000_000, 1_100_000)
    built.step(1, 1_100_000, 1_200_000)
    built.collective("all_gather", 1_080_000, 1_150_000, launch=1_110_000)
    built.kernel("a", 1_010_000, 1_090_000, launch=1_005_000)
    (row,) = [row for row in rows_of(built, tmp_path) if "communication" in row.label]
    assert [(bar.start, bar.duration) for bar in row.bars] == [(80_000, 20_000)]


def test_the_memory_curve_keeps_its_peaks(tmp_path: Path, trace_builder: Any) -> None:
    built = trace_builder()
    built.step(0, 1_000_000, 90_000_000)
    rng = np.random.default_rng(1)
    allocated = rng.integers(1, 1_000_000, 20_000)
    allocated[7777], allocated[15_000] = 5_000_000, 0
    for number, total in enumerate(allocated.tolist()):
        built.memory(1_000_000 + number * 1000, 1, total, 6_000_000 if number == 9999 else 5_500_000)
        built.memory(1_000_000 + number * 1000, 1, 10**9, 0, device_type=0)
    built.retry(2_000_000, 4096, 8192)
    curve = memory_curve(read_trace(built.write(tmp_path / "t.json")), max_points=300)
    assert len(curve) <= 310
    assert curve.allocated.max() == 5_000_000
    assert curve.allocated.min() == 0
    assert curve.reserved.max() == 6_000_000
    assert int(curve.time[curve.allocated.argmax()]) == 7777 * 1000
    assert (curve.time[0], curve.time[-1]) == (0, 19_999_000)
    retries = (curve.retry_time, curve.retry_bytes, curve.retry_freed)
    assert [column.tolist() for column in retries] == [[1_000_000], [4096], [8192]]


def test_peaks_and_retries_by_step(tmp_path: Path, trace_builder: Any) -> None:
    built = trace_builder()
    for number in range(2):
        built.step(number, 1_000_000 * (number + 1), 1_000_000 * (number + 2))
    built.memory(1_500_000, 10, 700, 900)
    built.memory(2_500_000, 10, 600, 1000)
    built.retry(2_500_000, 10, 20)
    memory = analyze([built.write(tmp_path / "t.json")]).ranks[0].memory
    assert (memory.peak_allocated, memory.peak_reserved) == (700, 1000)
    assert ([retry.step for retry in memory.retries], memory.retries_per_step) == ([1], (0, 1))


def test_active_memory_is_drawn_where_the_trace_tells_it(tmp_path: Path, fsdp_trace: Any) -> None:
    """Simulated traces write it; those of torch.profiler do not."""
    fsdp_trace.memory(1_050_000, 700, 700, 2000)
    fsdp_trace.memory(1_060_000, -700, 0, 2000)
    silent = memory_curve(read_trace(fsdp_trace.write(tmp_path / "silent" / "rank0_trace.json")))
    assert len(silent.active) == 0
    instants = [event for event in fsdp_trace.events if event["name"] == "[memory]"]
    for event, active in zip(instants, (700, 500), strict=True):
        event["args"]["Total Active"] = active
    path = fsdp_trace.write(tmp_path / "told" / "rank0_trace.json")
    assert memory_curve(read_trace(path)).active.tolist() == [700, 500]
    memory = analyze([path]).ranks[0].memory
    assert (memory.peak_allocated, memory.peak_active, memory.peak_reserved) == (700, 700, 2000)
