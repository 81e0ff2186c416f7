"""Names of everything that ran: totals, kernels that Inductor fused, and counts of kernels and copies.

A fused kernel's name, `triton_poi_fused__to_copy_add_7`, holds how the kernel goes over its data (`poi`), the
operators that were fused, sorted, and a number, which a second graph counts again. Kernels of the same
operators are one group.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from fsdpbench.reports.analysis.activity import Activity
from fsdpbench.reports.analysis.naming import PATTERNS
from fsdpbench.reports.analysis.records import Ns, Record
from fsdpbench.reports.analysis.units import LIMITER_WAIT, FsdpSpans
from fsdpbench.reports.analysis.windows import Window, containing
from fsdpbench.reports.readers import Trace

_FUSED = re.compile(
    r"^(?:triton_(?P<kind>poi|red|per|tem|mix|for)|(?:graph_\d+_)?(?P<cpu>cpp))_fused_?(?P<operators>\w*?)(?:_\d+)?$"
)
_MOVING = re.compile(
    r"(?:_*(?:to_copy|unsafe_view|view|reshape|clone|copy|cat|stack|permute|transpose|t|expand|select|slice|"
    r"split_with_sizes|split|unbind|unsqueeze|squeeze|alias|detach|as_strided))+"
)


@dataclass(frozen=True)
class FusedGroup(Record):
    """Fused kernels of one origin within the steps. `operators`: as Inductor joins their names. `kernels`:
    how many different ones; `count`: launches; `time`: ns."""

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
    """Return whether a fused kernel computes nothing, only casts and moves data; None for other names."""
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
    names = trace.events.name[work.row[inside]]
    counts = np.bincount(names, minlength=len(trace.names))
    found, where = np.unique(names, return_inverse=True)
    times = np.zeros(len(found), np.int64)
    np.add.at(times, where, (work.end - work.start)[inside])
    totals = [
        NameTotal(trace.names[number], int(counts[number]), int(time))
        for number, time in zip(found.tolist(), times.tolist(), strict=True)
    ]
    return tuple(sorted(totals, key=lambda total: (-total.time, total.name)))


# Counts name a regression exactly: an extra copy or a lost wait moves a step by less than noise does on real
# hardware, and its count by one.

_COPY = re.compile(r"copy|clone|CatArray|_cat_|(^|_)stack_", re.IGNORECASE)


@dataclass(frozen=True)
class WorkCounts:
    """Over all steps.

    kernels: computation launched (operators on a CPU trace).  copies: what of it moves data only, with memcpy
    and memset; by name, and a copy fused into a kernel that computes does not count.  limiter_waits:
    times that the CPU asked the rate limiter and waited for a mark of it.
    """

    kernels: int = 0
    copies: int = 0
    limiter_waits: int = 0

    def to_dict(self, steps: int = 1) -> dict[str, int | float]:
        """Return a mean step's counts; whole numbers where steps are alike."""
        counts = {"kernels": self.kernels, "copies": self.copies, "limiter_waits": self.limiter_waits}
        return {name: n // steps if n % steps == 0 else n / steps for name, n in counts.items()}


def count_work(trace: Trace, activity: Activity, spans: FsdpSpans, windows: Sequence[Window]) -> WorkCounts:
    """Return counts of everything that was launched inside the marks of the steps' `windows`.

    Args:
        activity, spans: of `trace`: its device work and its FSDP annotations.
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
