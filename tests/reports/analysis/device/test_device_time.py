"""Memory by the device's clock: a CPU that runs ahead allocates early, and the device gets there later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fsdpbench.reports.analysis.activity import find_activity
from fsdpbench.reports.analysis.memory import device_clock, memory_curve
from fsdpbench.reports.analysis.units import fsdp_spans
from fsdpbench.reports.readers import read_trace

US = 1000


def at(us: float) -> int:
    return 1_000_000 + int(us * US)


def test_memory_is_there_when_the_device_comes_to_it(tmp_path: Path, trace_builder: Any) -> None:
    built = trace_builder()
    built.kernel("first", at(0), at(100), launch=at(-10))
    built.kernel("second", at(100), at(300), launch=at(10))
    built.kernel("third", at(300), at(400), launch=at(30))
    for time, total in ((0, 1), (20, 2), (25, 1), (40, 0), (500, 3)):
        built.memory(at(time), 1, total * 2**20, 4 * 2**20)
    trace = read_trace(built.write(tmp_path / "rank0_trace.json"))
    clock = device_clock(find_activity(trace, fsdp_spans(trace)))
    assert clock is not None
    curve = memory_curve(trace, origin=at(0), clock=clock)
    assert curve.time.tolist() == [100 * US, 300 * US, 300 * US, 400 * US, 500 * US]
    assert curve.allocated.tolist() == [each * 2**20 for each in (1, 2, 1, 0, 3)]
    assert memory_curve(trace, origin=at(0)).time.tolist() == [0, 20 * US, 25 * US, 40 * US, 500 * US]
    times = np.sort(np.random.default_rng(0).integers(at(-50), at(600), 200))
    assert (np.diff(clock(times)) >= 0).all()


def test_a_trace_of_a_cpu_keeps_its_own(tmp_path: Path, trace_builder: Any) -> None:
    built = trace_builder()
    built.op("aten::mm", at(0), at(10))
    trace = read_trace(built.write(tmp_path / "rank0_trace.json"))
    assert device_clock(find_activity(trace, fsdp_spans(trace))) is None
