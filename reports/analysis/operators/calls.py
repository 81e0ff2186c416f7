"""Which kernels an operator's call launched, and how near they came to the peak.

A kernel belongs to the innermost call of known shape around its launch. Of several kernels of one call (a
product split over K and its sum) the longest stands for the work in the kernels' own table.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from fsdpbench.reports.analysis.device.activity import Work
from fsdpbench.reports.analysis.device.nesting import NOTHING, index_spans
from fsdpbench.reports.analysis.operators.chip import Chip, compute_type
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
