"""Which kernels an operator's call launched, and how near they came to the peak.

A kernel belongs to the innermost call of known shape around its launch. Of several kernels of one call (a
product split over K and its sum) the longest stands for the work in the kernels' own table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fsdpbench.reports.analysis.device.activity import Work
from fsdpbench.reports.analysis.device.nesting import NOTHING, index_spans
from fsdpbench.reports.analysis.operators.chip import Chip, compute_type
from fsdpbench.reports.analysis.operators.costs import CallCost, cost_of
from fsdpbench.reports.analysis.operators.model import OperatorTotal, Rate
from fsdpbench.reports.trace import OperatorCall, Trace

_FROM_OR_TO_HOST = re.compile(r"Memcpy (?!DtoD)|CopyHostToDevice|CopyDeviceToHost")


@dataclass(frozen=True)
class TimedCall:
    """One call: its row, its work, and ns of its kernels; `kernel`: place of the longest in the work, None on
    a CPU."""

    name: str
    call: OperatorCall
    cost: CallCost
    time: int
    kernel: int | None
    least: float | None
    bound: str | None


def timed_calls(trace: Trace, work: Work, on_device: bool, chip: Chip | None) -> Iterator[TimedCall]:
    """The calls that launched some of `work` (on a CPU: all of the trace), in the trace's order."""
    rows = np.fromiter(trace.calls, np.int64, len(trace.calls))
    events = trace.events
    if not len(rows):
        return
    if on_device:
        index = index_spans(events.lane[rows], events.start[rows], events.end[rows])
        place = index.innermost(work.launch_lane, work.launch)
        place[work.is_communication] = NOTHING
        mine = np.flatnonzero(place != NOTHING)
        duration = (work.end - work.start)[mine]
        time = np.zeros(len(rows), np.int64)
        np.add.at(time, place[mine], duration)
        order = np.argsort(duration, kind="stable")
        longest = np.full(len(rows), NOTHING, np.int64)
        longest[place[mine][order]] = mine[order]  # the last one to be written is the longest
    else:
        time = np.where(np.isin(rows, work.row), events.duration[rows], 0)
        longest = np.full(len(rows), NOTHING, np.int64)
    for number in np.flatnonzero(time > 0).tolist():
        row = int(rows[number])
        name, call = trace.name_of(row), trace.calls[row]
        cost = cost_of(name, call)
        kernel = int(longest[number]) if longest[number] != NOTHING else None
        ran = trace.name_of(int(work.row[kernel])) if kernel is not None else ""
        # What crosses the host's link, or runs on the host, is not held against the device's memory.
        roof = chip if on_device and not _FROM_OR_TO_HOST.search(ran) else None
        least, bound = _roof(roof, cost, compute_type(cost.dtype, ran))
        yield TimedCall(name, call, cost, int(time[number]), kernel, least, bound)


def _roof(chip: Chip | None, cost: CallCost, kind: str | None) -> tuple[float | None, str | None]:
    """ns at the peak, and what binds there."""
    if chip is None or (cost.flops is not None and (kind or "") not in chip.peak_flops):
        return None, None
    least = chip.least_s(cost.flops, cost.bytes, kind)
    computing = chip.least_s(cost.flops, None, kind)
    if least is None:
        return None, None
    return least * 1e9, "compute" if computing == least else "memory"


def operator_totals(calls: list[TimedCall], total: int) -> tuple[OperatorTotal, ...]:
    """By name and shapes, the longest first; `total`: ns of all kernels."""
    groups: dict[tuple[str, OperatorCall, str | None], list[TimedCall]] = {}
    for each in calls:
        groups.setdefault((each.name, each.call, each.bound), []).append(each)
    found = [_total(name, bound, group, total) for (name, _, bound), group in groups.items()]
    return tuple(sorted(found, key=lambda each: (-each.time, each.name, each.shapes)))


def _total(name: str, bound: str | None, group: list[TimedCall], total: int) -> OperatorTotal:
    cost, time = group[0].cost, sum(each.time for each in group)
    rate = sum((rate_of(each) for each in group), Rate())
    shapes = ", ".join("x".join(map(str, size)) for size in group[0].call.sizes if size)[:200]
    share = time / total if total else 0.0
    return OperatorTotal(
        name, shapes, cost.dtype, len(group), time, share, cost.flops, cost.bytes, bound, rate
    )


def rate_of(call: TimedCall) -> Rate:
    """The call's work and time; nothing where its work is not known."""
    if call.cost.flops is None and call.cost.bytes is None:
        return Rate()
    return Rate(call.time, call.cost.flops, call.cost.bytes, call.least)
