"""Which kernels an operator's call launched, and how near they came to the peak.

A kernel belongs to the innermost call of known shape around its launch. Of several kernels of one call (a
product split over K and its sum) the longest stands for the work in the kernels' own table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fsdpbench.reports.analysis.device.activity import Work
from fsdpbench.reports.analysis.device.units import NOTHING, index_spans
from fsdpbench.reports.analysis.operators.costs import CallCost, cost_of
from fsdpbench.reports.analysis.operators.model import OperatorTotal, Rate
from fsdpbench.reports.trace import OperatorCall, Trace

_FROM_OR_TO_HOST = re.compile(r"Memcpy (?!DtoD)|CopyHostToDevice|CopyDeviceToHost")


@dataclass(frozen=True)
class CallGroup:
    """Calls of one operator with the same inputs, most of whose time is of kernels of one name.

    count: of calls.  time: ns of all their kernels.  kernel: index of that name, None on a CPU;
    kernel_time: ns of these kernels, one a call.  least: ns of a call at the peak, where one is known.
    """

    name: str
    call: OperatorCall
    cost: CallCost
    count: int
    time: int
    kernel: int | None
    kernel_time: int
    least: float | None
    bound: str | None

    def rate(self, time: int) -> Rate:
        """Their work over `time`; nothing where it is not known."""
        if self.cost.flops is None and self.cost.bytes is None:
            return Rate()
        one = (self.cost.flops, self.cost.bytes, self.least)
        whole: list[Any] = [None if each is None else each * self.count for each in one]
        return Rate(time, *whole)


def call_groups(trace: Trace, work: Work, on_device: bool, chip: Chip | None) -> list[CallGroup]:
    """The calls that launched some of `work` (on a CPU: all of the trace)."""
    rows = np.fromiter(trace.calls, np.int64, len(trace.calls))
    events = trace.events
    kernel, kernel_time = np.full(len(rows), NOTHING, np.int64), np.zeros(len(rows), np.int64)
    if on_device and len(rows):
        index = index_spans(events.lane[rows], events.start[rows], events.end[rows])
        place = index.innermost(work.launch_lane, work.launch)
        place[work.is_communication] = NOTHING
        mine = np.flatnonzero(place != NOTHING)
        duration = (work.end - work.start)[mine]
        time = np.zeros(len(rows), np.int64)
        np.add.at(time, place[mine], duration)
        order = np.argsort(duration, kind="stable")  # of one place the longest is written last
        kernel[place[mine][order]] = events.name[work.row[mine[order]]]
        kernel_time[place[mine][order]] = duration[order]
    else:
        time = np.where(np.isin(rows, work.row), events.duration[rows], 0)
    groups: dict[tuple[int, int, int], list[int]] = {}
    numbers = zip(events.name[rows].tolist(), map(id, trace.calls.values()), kernel.tolist(), strict=True)
    for number, key in enumerate(numbers):
        if time[number] > 0:
            groups.setdefault(key, []).append(number)
    found = []
    for (_, _, ran), each in groups.items():
        row = int(rows[each[0]])
        name, call = trace.name_of(row), trace.calls[row]
        cost, word = cost_of(name, call), trace.names[ran] if ran != NOTHING else ""
        # What crosses the host's link, or runs on the host, is not held against the device's memory.
        least, bound = None, None
        if chip is not None and on_device and not _FROM_OR_TO_HOST.search(word):
            least, bound = chip.roof(cost.flops, cost.bytes, compute_type(cost.dtype, word) or "")
        times = int(time[each].sum()), None if ran == NOTHING else ran, int(kernel_time[each].sum())
        found.append(CallGroup(name, call, cost, len(each), *times, least, bound))
    return found


def operator_totals(calls: list[CallGroup], total: int) -> tuple[OperatorTotal, ...]:
    """By name and shapes, the longest first; `total`: ns of all kernels."""
    groups: dict[tuple[str, OperatorCall, str | None], list[CallGroup]] = {}
    for each in calls:
        groups.setdefault((each.name, each.call, each.bound), []).append(each)
    found = [_total(name, bound, group, total) for (name, _, bound), group in groups.items()]
    return tuple(sorted(found, key=lambda each: (-each.time, each.name, each.shapes)))


def _total(name: str, bound: str | None, group: list[CallGroup], total: int) -> OperatorTotal:
    cost, time = group[0].cost, sum(each.time for each in group)
    rate = sum((each.rate(each.time) for each in group), Rate())
    shapes = ", ".join("x".join(map(str, size)) for size in group[0].call.sizes if size)[:200]
    share, count = time / total if total else 0.0, sum(each.count for each in group)
    return OperatorTotal(name, shapes, cost.dtype, count, time, share, cost.flops, cost.bytes, bound, rate)


ANY_CHIP = ""
"""Instead of a device's name: this chip, whatever the trace says."""

_COMPUTE_TYPES = {
    "bfloat16": "bf16",
    "half": "fp16",
    "float": "fp32",
    "float32": "fp32",
    "double": "fp64",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
    "float4_e2m1fn_x2": "nvfp4",
}


@dataclass(frozen=True)
class Chip:
    """name: of the hardware profile that says so.  peak_flops: dense FLOP/s by compute type (bf16, fp16,
    tf32, fp32, ...).  memory_bandwidth: bytes per second."""

    name: str
    peak_flops: Mapping[str, float]
    memory_bandwidth: float

    def roof(self, flops: float | None, size: float | None, kind: str) -> tuple[float | None, str | None]:
        """The ns that so many FLOPs of a type and bytes of memory take at the peak, and which of them bind;
        None where that is not known."""
        peak = self.peak_flops.get(kind)
        if (flops is not None and peak is None) or not (flops or size):
            return None, None
        computing, moving = (flops or 0) / (peak or 1), (size or 0) / self.memory_bandwidth
        return max(computing, moving) * 1e9, "compute" if computing >= moving else "memory"


def chip_of(trace: Trace, known: Mapping[str, Chip]) -> Chip | None:
    """The chip known for any device, else the one that the trace's own label describes, else that known by
    the label's name or by the first device's."""
    if ANY_CHIP in known:
        return known[ANY_CHIP]
    hardware = (trace.simulated or {}).get("hardware")
    label = hardware if isinstance(hardware, Mapping) else {}
    names = [label.get("name"), *(device.get("name") for device in trace.devices)]
    by_name = (known[name] for name in names if isinstance(name, str) and name in known)
    return described(label) or next(by_name, None)


def described(hardware: Mapping[str, Any]) -> Chip | None:
    """The chip that a description of hardware tells the peaks of; None where it tells none."""
    try:
        peaks = {str(kind): float(peak) for kind, peak in hardware["peak_flops"].items()}
        found = Chip(str(hardware["name"])[:200], peaks, float(hardware["memory_bytes_per_s"]))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return None
    return found if all(0 < rate < 1e30 for rate in (*peaks.values(), found.memory_bandwidth)) else None


def compute_type(input_type: str, kernel: str) -> str | None:
    """In which type a product is computed, from that of its inputs and its kernel's name."""
    found = _COMPUTE_TYPES.get(input_type.lower().removeprefix("c10::"))
    if found == "fp32" and ("tf32" in kernel.lower() or "s1688" in kernel):
        return "tf32"
    return found
