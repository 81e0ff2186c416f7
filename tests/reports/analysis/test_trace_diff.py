"""What changed between two traces, with known changes planted; HTA's own diff as the second witness."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from real_shapes import cpu_only

from fsdpbench.reports.analysis import analyze
from fsdpbench.reports.analysis.trace_diff import TraceDiff, describe_diff, diff_analyses
from fsdpbench.reports.readers.hta import hta_trace_diff

US = 1000


def step_of(built: Any, start: int, *, gemm: int = 100, gathers: int = 1, copies: int = 0) -> int:
    """One step from `start` (ns); returns its end: a gemm of so many us, all-gathers of 20 us behind it, and
    copies of 5 us behind them."""
    at = start + 10 * US
    built.kernel("gemm", at, at + gemm * US, launch=start + US)
    at += gemm * US
    for _ in range(gathers):
        built.collective("all_gather", at, at + 20 * US, launch=start + 2 * US, elements=800)
        at += 20 * US
    for _ in range(copies):
        built.kernel("copy_kernel", at, at + 5 * US, launch=start + 3 * US)
        at += 5 * US
    return at


def write(tmp_path: Path, builder: Any, name: str, steps: int, **what: int) -> Path:
    built = builder()
    now = 1_000_000
    # HTA loses the kernel of a launch that is the first event of the file.
    built.annotation("begin", now - US, now)
    for index in range(steps):
        end = step_of(built, now, **what)
        built.step(index, now, end)
        now = end
    return built.write(tmp_path / name / "rank0_trace.json")


@pytest.fixture
def diff(tmp_path: Path, trace_builder: Any) -> Callable[..., TraceDiff]:
    """The diff of two steps as they are to three that are `changed`."""

    def made(**changed: int) -> TraceDiff:
        before = write(tmp_path, trace_builder, "before", 2)
        after = write(tmp_path, trace_builder, "after", 3, **changed)
        (found,) = diff_analyses(analyze([before]), analyze([after]))
        return found

    return made


def test_equal_steps_differ_in_nothing(diff: Callable[..., TraceDiff]) -> None:
    found = diff()
    assert found.step.by == 0
    assert found.names == ()
    told = describe_diff(found)
    assert "A step takes as long as before, 0.130 ms." in told
    assert "what ran is the same" in told


def test_a_slower_kernel(diff: Callable[..., TraceDiff]) -> None:
    found = diff(gemm=110)
    (name,) = found.names
    assert (name.name, name.count.by, name.time.before, name.time.after) == ("gemm", 0, 100 * US, 110 * US)
    assert {part.name: part.by for part in found.parts if part.by} == {"compute_only": 10 * US}
    assert "A step takes 0.010 ms (+7.69 %) more, most of it compute only (+0.010 ms)." in describe_diff(
        found
    )


def test_a_faster_kernel(diff: Callable[..., TraceDiff]) -> None:
    told = describe_diff(diff(gemm=90))
    assert "A step takes 0.010 ms (-7.69 %) less, most of it compute only (-0.010 ms)." in told
    assert "CPU" not in told


def test_traces_of_different_devices_are_noted(tmp_path: Path, trace_builder: Any) -> None:
    before = write(tmp_path, trace_builder, "gpu", 2)
    (found,) = diff_analyses(analyze([before]), analyze([cpu_only().write(tmp_path / "rank0_trace.json")]))
    assert "note: one trace is of a CPU, the other of a GPU" in describe_diff(found)


def test_a_further_collective_and_what_is_new(diff: Callable[..., TraceDiff]) -> None:
    found = diff(gathers=2, copies=3)
    changes = {each.name: each for each in found.collectives["all_gather"]}
    assert (changes["count"].before, changes["count"].after) == (1, 2)
    assert (changes["bytes"].before, changes["bytes"].after) == (1600, 3200)
    assert changes["exposed"].by == 20 * US
    told = describe_diff(found)
    assert "all-gather: 1 -> 2 a step" in told
    assert "0 -> 3 (new)  copy_kernel" in told
    printed = found.to_dict()
    assert printed["communication"]["all_gather"]["exposed_s"] == {"before": 20e-6, "after": 40e-6}
    assert printed["step_time_s"] == {"before": 130e-6, "after": 165e-6}


def test_hta_says_the_same(tmp_path: Path, trace_builder: Any) -> None:
    before = write(tmp_path, trace_builder, "before", 2)
    after = write(tmp_path, trace_builder, "after", 2, gathers=3, copies=2, gemm=90)
    (found,) = diff_analyses(analyze([before]), analyze([after]))
    theirs = hta_trace_diff(before, after)
    ours = {
        each.name: (
            *(2 * count for count in (each.count.before, each.count.after)),
            *(2 * time / 1e9 for time in (each.time.before, each.time.after)),
        )
        for each in found.names
    }
    assert set(ours) == set(theirs)
    for name, row in ours.items():
        assert theirs[name] == pytest.approx(row, abs=1e-9)
