"""All tables of what ran within the steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fsdpbench.reports import intervals
from fsdpbench.reports.analysis.device.activity import Activity, Work
from fsdpbench.reports.analysis.device.nesting import NOTHING, index_spans
from fsdpbench.reports.analysis.device.windows import Window, containing
from fsdpbench.reports.analysis.operators.calls import CallGroup, call_groups, operator_totals
from fsdpbench.reports.analysis.operators.chip import Chip
from fsdpbench.reports.analysis.operators.families import family_of
from fsdpbench.reports.analysis.operators.model import DeviceUse, KernelTotal, Rate, WorkTables
from fsdpbench.reports.analysis.operators.modules import module_totals
from fsdpbench.reports.trace import Trace
from fsdpbench.reports.trace.model import Int32, Int64


def work_tables(
    trace: Trace, activity: Activity, windows: Sequence[Window], chip: Chip | None = None
) -> WorkTables:
    """Kernels, operators, modules and devices; `chip`: whose peak the rates are held against."""
    on_device = activity.kind == "gpu"
    # Own times first: an operator that reaches out of a step takes what is in it along.
    whole = activity.work
    every = whole.end - whole.start if on_device else _own_times(trace, whole)
    inside = containing([window.mark for window in windows], whole.asked()) >= 0
    work, time = whole.select(inside), every[inside]
    total = int(time.sum())
    calls = call_groups(trace, work, on_device, chip)
    kernels = _kernels(trace, work, time, total, calls, activity)
    return WorkTables(
        total=total,
        kernels=kernels,
        families=_families(kernels, total),
        operators=operator_totals(calls, total),
        modules=module_totals(trace, work, time, total),
        devices=_devices(trace, work, windows) if on_device else (),
        roof=chip.name if chip is not None else None,
    )


def _own_times(trace: Trace, work: Work) -> Int64:
    """Of operators on a CPU: without the operators inside them."""
    index = index_spans(trace.events.lane[work.row], work.start, work.end)
    parents = index.parents_by_row()
    duration = work.end - work.start
    own = duration.copy()
    nested = parents != NOTHING
    np.subtract.at(own, parents[nested], duration[nested])
    return np.maximum(own, 0)


def _kernels(
    trace: Trace, work: Work, time: Int64, total: int, calls: Sequence[CallGroup], activity: Activity
) -> tuple[KernelTotal, ...]:
    names = trace.events.name[work.row]
    found, where = np.unique(names, return_inverse=True)
    counts = np.bincount(where, minlength=len(found))
    times = np.zeros(len(found), np.int64)
    np.add.at(times, where, time)
    rates = _rates(work, found, where, calls, activity)
    kinds: dict[int, tuple[bool, bool]] = {}
    flags = zip(where.tolist(), work.is_communication.tolist(), work.is_copy.tolist(), strict=True)
    for place, is_communication, is_copy in flags:
        kinds.setdefault(place, (is_communication, is_copy))
    order = np.lexsort((found, -times)).tolist()
    return tuple(
        KernelTotal(
            trace.names[int(found[place])],
            family_of(trace.names[int(found[place])], *kinds[place]),
            int(counts[place]),
            int(times[place]),
            int(times[place]) / total if total else 0.0,
            rates.get(place, Rate()),
        )
        for place in order
    )


def _rates(
    work: Work, found: Int32, where: Int64, calls: Sequence[CallGroup], activity: Activity
) -> dict[int, Rate]:
    """By place of the name: known work of the operators whose longest kernel it is, and of collectives by
    their wire bytes against the links' peak."""
    rates: dict[int, Rate] = {}
    duration = work.end - work.start
    for call in calls:
        if call.kernel is not None:
            place = int(np.searchsorted(found, call.kernel))
            rates[place] = rates.get(place, Rate()) + call.rate(call.kernel_time)
    collectives = activity.collectives
    sent = {
        int(row): (int(wire), float(roof))
        for row, wire, roof in zip(collectives.work.row, collectives.wire, collectives.roof, strict=True)
        if wire > 0
    }
    for number in np.flatnonzero(work.is_communication).tolist():
        wire, roof = sent.get(int(work.row[number]), (0, 0.0))
        if wire:
            least = wire / roof * 1e9 if roof else None
            place = int(where[number])
            rates[place] = rates.get(place, Rate()) + Rate(int(duration[number]), None, wire, least)
    return rates


def _families(kernels: Sequence[KernelTotal], total: int) -> tuple[KernelTotal, ...]:
    groups: dict[str, list[KernelTotal]] = {}
    for kernel in kernels:
        groups.setdefault(kernel.family, []).append(kernel)
    found = [
        KernelTotal(
            family,
            family,
            sum(each.count for each in group),
            (time := sum(each.time for each in group)),
            time / total if total else 0.0,
            sum((each.rate for each in group), Rate()),
        )
        for family, group in groups.items()
    ]
    return tuple(sorted(found, key=lambda each: (-each.time, each.name)))


def _devices(trace: Trace, work: Work, windows: Sequence[Window]) -> tuple[DeviceUse, ...]:
    device = trace.events.device[work.row]
    start, end = windows[0].start, windows[-1].end
    found = []
    for each in np.unique(device).tolist():
        mine = work.select(device == each)

        def length(chosen: Work) -> int:
            return intervals.clip(intervals.of(chosen.start, chosen.end), start, end).length()

        found.append(
            DeviceUse(
                each,
                length(mine),
                length(mine.select(~mine.is_communication & ~mine.is_copy)),
                length(mine.select(mine.is_communication)),
                end - start,
            )
        )
    return tuple(found)
