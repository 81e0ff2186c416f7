"""Allocations and frees of one instant: their totals tell the order, whatever the file's is."""

from __future__ import annotations

import json
import random
import time
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np

from fsdpbench.reports.analysis import analyze
from fsdpbench.reports.analysis.operators import CallCost, CallGroup, operator_totals
from fsdpbench.reports.analysis.peaks import Chip
from fsdpbench.reports.readers.trace import MemoryEvents, OperatorCall
from fsdpbench.reports.readers.trace_columns import in_order

# Time, bytes, total after it, address: a block is freed and the same allocated again, then another is freed.
GIVEN = ((5, 512, 512, 1), (7, 1024, 1536, 2), (7, -1024, 512, 2), (7, 1024, 1536, 2), (7, -512, 1024, 1))


def events(rows: Any, device: int = 0) -> MemoryEvents:
    times, sizes, totals, addresses = np.array(rows, np.int64).reshape(-1, 4).T
    same = np.ones(len(times), np.int64)
    return MemoryEvents(times, sizes, totals, totals + 1, addresses, same, same * device, -same)


def told(memory: MemoryEvents) -> list[tuple[int, ...]]:
    columns = (memory.time, memory.bytes, memory.allocated, memory.address)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_every_order_becomes_the_one_that_the_totals_tell() -> None:
    for order in permutations(GIVEN[1:]):
        assert told(in_order(events([GIVEN[0], *order]))) == list(GIVEN)


def test_totals_that_tell_of_no_order_leave_the_files() -> None:
    rows = [(5, 512, 512, 1), (7, 8, 99, 2), (7, 8, 5, 3), (8, 1, 6, 4)]
    assert told(in_order(events(rows))) == rows
    assert len(in_order(events([]))) == 0


def test_it_takes_little_time_where_nothing_fits() -> None:
    count = 40_000
    number = np.arange(count)
    rows = np.stack([number // 40, 0 * number, np.where(number % 40 == 7, 9, 0), number % 3], axis=1)
    began = time.process_time()
    assert told(in_order(events(rows))) == [tuple(row) for row in rows.tolist()]
    assert time.process_time() - began < 5


def test_what_is_alive_at_the_peak_does_not_hang_on_the_order_in_the_file(
    tmp_path: Path, trace_builder: Any
) -> None:
    found = []
    for turned in (False, True):
        built = trace_builder()
        built.step(0, 1_000_000, 2_000_000)
        built.kernel("gemm", 1_200_000, 1_300_000, launch=1_100_000)
        built.memory(1_100_000, 512, 512, 4096)
        # The address is the same: freed, and then allocated again.
        again = [(-512, 0), (2048, 2048)]
        for size, total in reversed(again) if turned else again:
            built.memory(1_500_000, size, total, 4096)
        found.append(analyze([built.write(tmp_path / "rank0_trace.json")]).ranks[0].memory.to_dict())
    assert found[0] == found[1]
    assert [each["bytes"] for each in found[0]["at_peak"]] == [2048]
    assert found[0]["before_trace_bytes"] == 0


def test_figures_do_not_hang_on_the_order_of_events_or_on_numbers_as_text(
    tmp_path: Path, trace_builder: Any
) -> None:
    """Kernels of equal times, sums of shares of a peak, and calls that the reader meets in two ways."""
    chips = {"Test GPU": Chip("a chip", {"bf16": 3.3e14, "fp32": 1e13}, 1.7e12)}
    built = trace_builder(deviceProperties=[{"id": 0, "name": "Test GPU"}])
    built.step(0, 1_000_000, 3_000_000)
    for number in range(36):
        start = 1_100_000 + number * 20_000
        rows = 64 << (number * 7 % 11)
        shapes = {"Input Dims": [[rows, 512], [512, 384]], "Input type": ["c10::BFloat16"] * 2}
        built.op("aten::mm", start, start + 9_000, **shapes)
        name = f"gemm_{number % 3}"
        built.kernel(name, start + 10_000, start + 13_000, launch=start + 1_000)
        built.kernel("split_k", start + 13_001, start + 16_001, launch=start + 3_000)
    document = built.document()
    shuffle = random.Random(3)
    found = []
    for number in range(12):
        changed = json.loads(json.dumps(document))
        if number:
            shuffle.shuffle(changed["traceEvents"])
            for event in changed["traceEvents"][::3]:
                event["ts"] = str(event["ts"])
        path = tmp_path / str(number) / "rank0_trace.json"
        path.parent.mkdir()
        path.write_text(json.dumps(changed))
        found.append(analyze([path], chips=chips).ranks[0].to_dict() | {"trace": None, "warnings": None})
    assert {each["time_s"] for each in found[0]["kernels"]} == {36e-6, 108e-6}
    assert any(each["roof_share"] for each in found[0]["kernels"])
    assert all(each == found[0] for each in found)


def test_totals_that_differ_in_their_dtype_alone_have_one_order() -> None:
    groups = [
        CallGroup(
            "aten::add_",
            OperatorCall(((8,),), (dtype,), ("",)),
            CallCost(8, 64, dtype),
            1,
            500,
            None,
            500,
            None,
            None,
        )
        for dtype in ("float", "c10::BFloat16", "c10::Half")
    ]
    found = {
        tuple(each.dtype for each in operator_totals(list(order), 1500)) for order in permutations(groups)
    }
    assert len(found) == 1
