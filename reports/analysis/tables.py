"""Tables of what ran within the steps: totals by name, kernels that Inductor fused, counts of copies.

A fused kernel's name, `triton_poi_fused__to_copy_add_7`, contains the kind of kernel (`poi`: pointwise), the
fused operators, sorted, and a number that starts again in each graph. Kernels of the same operators are one
group.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from fsdpbench.reports.analysis import intervals
from fsdpbench.reports.analysis.activity import Activity, Work
from fsdpbench.reports.analysis.naming import PATTERNS, collective_type
from fsdpbench.reports.analysis.operators import (
    CallGroup,
    DeviceUse,
    KernelTotal,
    ModuleTotal,
    Rate,
    WorkTables,
    call_groups,
    operator_totals,
)
from fsdpbench.reports.analysis.peaks import Chip
from fsdpbench.reports.analysis.records import Ns, Record
from fsdpbench.reports.analysis.units import LIMITER_WAIT, NOTHING, FsdpSpans, index_spans
from fsdpbench.reports.analysis.windows import Window, containing
from fsdpbench.reports.readers import Category, Trace
from fsdpbench.reports.readers.trace import Int32, Int64

_FUSED = re.compile(
    r"^(?:triton_(?P<kind>poi|red|per|tem|mix|for)|(?:graph_\d+_)?(?P<cpu>cpp))_fused_?(?P<operators>\w*?)(?:_\d+)?$"
)
_MOVING = re.compile(
    r"(?:_*(?:to_copy|unsafe_view|view|reshape|clone|copy|cat|stack|permute|transpose|t|expand|select|slice|"
    r"split_with_sizes|split|unbind|unsqueeze|squeeze|alias|detach|as_strided))+"
)


def work_tables(
    trace: Trace, activity: Activity, windows: Sequence[Window], chip: Chip | None = None
) -> WorkTables:
    """Return tables of the kernels, operators, modules and devices of `trace` within the steps' `windows`.

    Args:
        activity: the activity of the trace.
        chip: the chip whose peak the rates are compared with, if known.
    """
    on_device = activity.kind == "gpu"
    # Own times first: an operator, and operators inside it, may extend beyond a step.
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
    """Return the ns of each operator of a CPU trace, without the operators inside it."""
    parents = index_spans(trace.events.lane[work.row], work.start, work.end).parents_by_row()
    duration = work.end - work.start
    own = duration.copy()
    nested = parents != NOTHING
    np.subtract.at(own, parents[nested], duration[nested])
    return np.maximum(own, 0)


def _kernels(
    trace: Trace, work: Work, time: Int64, total: int, calls: Sequence[CallGroup], activity: Activity
) -> tuple[KernelTotal, ...]:
    names = trace.events.name[work.row]
    rates = _rates(work, names, calls, activity)
    first = np.zeros(len(trace.names), np.int64)
    first[names[::-1]] = np.arange(len(names))[::-1]
    return tuple(
        KernelTotal(
            each.name,
            family_of(each.name, bool(work.is_communication[at := first[number]]), bool(work.is_copy[at])),
            each.count,
            each.time,
            each.time / total if total else 0.0,
            rates.get(number, Rate()),
        )
        for number, each in _by_name(trace, names, time)
    )


def _by_name(trace: Trace, names: Int32, time: Int64) -> list[tuple[int, NameTotal]]:
    """Return the number of each name with its total of `time`, the longest first."""
    counts, times = np.bincount(names, minlength=len(trace.names)), np.zeros(len(trace.names), np.int64)
    np.add.at(times, names, time)
    found = [
        (number, NameTotal(trace.names[number], int(counts[number]), int(times[number])))
        for number in np.flatnonzero(counts).tolist()
    ]
    # Ties by name: numbers of names follow the order of events in the file.
    return sorted(found, key=lambda pair: (-pair[1].time, pair[1].name))


def _rates(work: Work, names: Int32, calls: Sequence[CallGroup], activity: Activity) -> dict[int, Rate]:
    """Return rates by the number of the name: the known work of operators whose longest kernel has the name,
    and of collectives the wire bytes against the links' peak."""
    rates: dict[int, Rate] = {}
    duration = work.end - work.start
    for call in calls:
        if call.kernel is not None:
            rates[call.kernel] = rates.get(call.kernel, Rate()) + call.rate(call.kernel_time)
    collectives = activity.collectives
    sent = {
        int(row): (int(wire), float(roof))
        for row, wire, roof in zip(collectives.work.row, collectives.wire, collectives.roof, strict=True)
        if wire > 0
    }
    sums = [
        (int(names[number]), *sent[int(work.row[number])], int(duration[number]))
        for number in np.flatnonzero(work.is_communication).tolist()
        if int(work.row[number]) in sent
    ]
    # Sorted, because floating-point sums depend on their order, and a file's order of events is arbitrary.
    for name, wire, roof, time in sorted(sums):
        least = wire / roof * 1e9 if roof else None
        rates[name] = rates.get(name, Rate()) + Rate(time, None, wire, least)
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
    kinds = np.True_, ~work.is_communication & ~work.is_copy, work.is_communication
    found = []
    for each in np.unique(device).tolist():
        chosen = ((device == each) & kind for kind in kinds)
        times = (intervals.of(work.start[rows], work.end[rows]) for rows in chosen)
        busy, computing, communicating = (intervals.clip(time, start, end).length() for time in times)
        found.append(DeviceUse(each, busy, computing, communicating, end - start))
    return tuple(found)


_FAMILIES = tuple((name, re.compile(pattern, re.IGNORECASE)) for name, pattern in PATTERNS["families"])


def family_of(name: str, is_communication: bool, is_copy: bool) -> str:
    """Return `matrix product`, `attention`, ..., the type of a collective (`all_gather`), or `other`."""
    if is_communication:
        return str(collective_type(name))
    if is_copy:
        return "copy"
    return next((family for family, pattern in _FAMILIES if pattern.search(name)), "other")


# Time by module, if the profiler records modules (`with_modules` or `with_stack`).
# A kernel belongs to the innermost module whose forward was running on the thread that launched it. Backward
# runs on autograd's thread, outside every module's frame, so these are the times of forward (recomputed
# forwards included).

_INSTANCE = re.compile(r"^nn\.Module: (.+?)(_\d+)?$")
MOST_CLASSES = 500


def module_totals(trace: Trace, work: Work, time: Int64, total: int) -> tuple[ModuleTotal, ...]:
    """Return totals by class of modules, the longest first.

    Args:
        work, time: the events within the steps, and the ns of each.
        total: the ns of all of them.
    """
    rows = trace.rows(Category.MODULE)
    if not len(rows):
        return ()
    events = trace.events
    index = index_spans(events.lane[rows], events.start[rows], events.ends(rows))
    place = index.innermost(work.launch_lane, work.launch)
    inside = place != NOTHING
    own = np.zeros(len(rows), np.int64)
    np.add.at(own, place[inside], time[inside])
    names = [trace.name_of(row) for row in rows.tolist()]
    classes = [found[1][:120] if (found := _INSTANCE.match(name)) else name[:120] for name in names]
    parents = index.parents_by_row().tolist()
    instances = Counter(kind for _, kind in set(zip(names, classes, strict=True)))
    owned: Counter[str] = Counter()
    whole: Counter[str] = Counter()
    for number, kind in enumerate(classes):
        ns = int(own[number])
        owned[kind] += ns
        around, climbed = number, set()
        while ns and around != NOTHING:
            if classes[around] not in climbed:  # of nested modules of one class only the outer one counts
                climbed.add(classes[around])
                whole[classes[around]] += ns
            around = parents[around]
    totals = [
        ModuleTotal(kind, instances[kind], calls, owned[kind], whole[kind], whole[kind] / (total or 1))
        for kind, calls in Counter(classes).items()
    ]
    totals.sort(key=lambda each: (-each.time, -each.own, each.name))
    return tuple(totals[:MOST_CLASSES])


@dataclass(frozen=True)
class FusedGroup(Record):
    """Fused kernels of the same operators within the steps. `operators`: their names as Inductor joins them.
    `kernels`: number of different kernels; `count`: launches; `time`: ns."""

    kind: str
    operators: str
    kernels: int
    count: int
    time: Ns


def fused_groups(names: Iterable[NameTotal]) -> tuple[FusedGroup, ...]:
    """Return the groups of fused kernels among everything that ran, the longest first."""
    found: dict[tuple[str, str], list[NameTotal]] = {}
    for total in names:
        if match := _FUSED.match(total.name):
            kind = PATTERNS["fused"][match["kind"] or match["cpu"]]
            found.setdefault((kind, match["operators"].strip("_") or "not named"), []).append(total)
    groups = [
        FusedGroup(
            *origin, len(all_of), sum(each.count for each in all_of), sum(each.time for each in all_of)
        )
        for origin, all_of in found.items()
    ]
    return tuple(sorted(groups, key=lambda group: (-group.time, group.operators)))


def moves_only(name: str) -> bool | None:
    """Return whether a fused kernel only casts and moves data, without computing; None for other names."""
    match = _FUSED.match(name)
    if match is None:
        return None
    return bool(_MOVING.fullmatch(match["operators"])) if match["operators"] else False


@dataclass(frozen=True)
class NameTotal:
    """Kernels, copies and collectives of one name (operators on a CPU trace), over all steps; time in ns.

    The time of operators includes that of operators inside them.
    """

    name: str
    count: int
    time: int


def name_totals(trace: Trace, activity: Activity, windows: Sequence[Window]) -> tuple[NameTotal, ...]:
    """Return totals of everything that was launched within the steps, the longest first."""
    work = activity.work
    inside = containing([window.mark for window in windows], work.asked()) >= 0
    found = _by_name(trace, trace.events.name[work.row[inside]], (work.end - work.start)[inside])
    return tuple(total for _, total in found)


# Counts identify a regression exactly: an extra copy or a lost wait changes a step's time by less than the
# noise on real hardware, but its count by one.

_COPY = re.compile(r"copy|clone|CatArray|_cat_|(^|_)stack_", re.IGNORECASE)


@dataclass(frozen=True)
class WorkCounts:
    """Counts over all steps.

    kernels: computation launched (operators on a CPU trace).  copies: kernels that only move data, by their
    names, with memcpy and memset; a copy fused into a kernel that computes does not count.  limiter_waits:
    how often the rate limiter made the CPU wait for an event.
    """

    kernels: int = 0
    copies: int = 0
    limiter_waits: int = 0

    def to_dict(self, steps: int = 1) -> dict[str, int | float]:
        """Return the counts of a mean step; whole numbers if steps are alike."""
        counts = {"kernels": self.kernels, "copies": self.copies, "limiter_waits": self.limiter_waits}
        return {name: n // steps if n % steps == 0 else n / steps for name, n in counts.items()}


def count_work(trace: Trace, activity: Activity, spans: FsdpSpans, windows: Sequence[Window]) -> WorkCounts:
    """Return counts of everything that was launched inside the marks of the steps' `windows`.

    Args:
        activity, spans: the device work and the FSDP annotations of `trace`.
    """
    work = activity.work
    marks = [window.mark for window in windows]
    inside = containing(marks, work.asked()) >= 0
    copying = trace.names_that(_is_copy)
    computing = inside & ~work.is_communication & ~work.is_copy
    moving = inside & (work.is_copy | (computing & copying[trace.events.name[work.row]]))
    waits = int((containing(marks, spans.start[spans.named(LIMITER_WAIT)]) >= 0).sum())
    return WorkCounts(int(computing.sum()), int(moving.sum()), waits)


def _is_copy(name: str) -> bool:
    fused = moves_only(name)
    return bool(_COPY.search(name)) if fused is None else fused
