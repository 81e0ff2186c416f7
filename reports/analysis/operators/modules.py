"""Time by module, where the profiler was told to record them (`with_modules` or `with_stack`).

A kernel belongs to the innermost module whose forward was running on the thread that launched it. Backward
runs on autograd's thread, outside of every module's frame, so these are the times of forward (and of what is
recomputed there).
"""

from __future__ import annotations

import re

import numpy as np

from fsdpbench.reports.analysis.device.activity import Work
from fsdpbench.reports.analysis.device.nesting import NOTHING, index_spans
from fsdpbench.reports.analysis.operators.model import ModuleTotal
from fsdpbench.reports.trace import Category, Trace
from fsdpbench.reports.trace.model import Int64

_INSTANCE = re.compile(r"^nn\.Module: (.+?)(_\d+)?$")
MOST_CLASSES = 500


def module_totals(trace: Trace, work: Work, time: Int64, total: int) -> tuple[ModuleTotal, ...]:
    """By class, the longest first. `time`: ns of each event of `work`; `total`: ns of all of it."""
    rows = trace.rows(Category.MODULE)
    if not len(rows):
        return ()
    events = trace.events
    index = index_spans(events.lane[rows], events.start[rows], events.end[rows])
    place = index.innermost(work.launch_lane, work.launch)
    inside = place != NOTHING
    own = np.zeros(len(rows), np.int64)
    np.add.at(own, place[inside], time[inside])
    names = [trace.name_of(row) for row in rows.tolist()]
    classes = [found[1][:120] if (found := _INSTANCE.match(name)) else name[:120] for name in names]
    parents = index.parents_by_row().tolist()
    calls: dict[str, int] = {}
    instances: dict[str, set[str]] = {}
    owned: dict[str, int] = {}
    whole: dict[str, int] = {}
    for number, (name, kind) in enumerate(zip(names, classes, strict=True)):
        calls[kind] = calls.get(kind, 0) + 1
        instances.setdefault(kind, set()).add(name)
        ns = int(own[number])
        owned[kind] = owned.get(kind, 0) + ns
        around, climbed = number, set()
        while ns and around != NOTHING:
            if classes[around] not in climbed:  # of a class inside itself the outer one counts
                climbed.add(classes[around])
                whole[classes[around]] = whole.get(classes[around], 0) + ns
            around = parents[around]
    totals = [
        ModuleTotal(
            kind,
            len(instances[kind]),
            calls[kind],
            owned[kind],
            whole.get(kind, 0),
            whole.get(kind, 0) / total if total else 0.0,
        )
        for kind in calls
    ]
    totals.sort(key=lambda each: (-each.time, -each.own, each.name))
    return tuple(totals[:MOST_CLASSES])
