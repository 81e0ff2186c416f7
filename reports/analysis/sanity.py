"""Checks whether a trace can be trusted, made before any figure is computed.

Each finding is a line. Some are only reported; others mean that times or counts are wrong, and then the rank
is not `trusted`.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from fsdpbench.base.errors import error_text
from fsdpbench.reports.analysis.activity import UNKNOWN_TIME, Activity
from fsdpbench.reports.analysis.naming import PATTERNS
from fsdpbench.reports.analysis.units import NOTHING, index_spans
from fsdpbench.reports.analysis.windows import STEP, Window
from fsdpbench.reports.readers import Category, Trace

OVERLAP_TOLERANCE_NS = 1000
"""Kernels of one stream may appear to overlap by this much: older profilers write whole microseconds."""
OVERLAPPING_SHARE = 0.01
"""Share of the kernels' time from which overlap is a doubt."""
LONGEST_NS = 24 * 3600 * 10**9
"""No recording lasts a day: a longer one has damaged time stamps."""
LOST_LAUNCH_SHARE = 0.01
"""Share of launches from which missing kernels are a doubt."""


@dataclass(frozen=True)
class Gate:
    """Doubts, any of which makes the trace untrusted, and remarks. `overlap_known`: overlap is visible."""

    doubts: tuple[str, ...]
    remarks: tuple[str, ...]
    overlap_known: bool

    @property
    def trusted(self) -> bool:
        """Return whether times and counts can be believed."""
        return not self.doubts


def check(trace: Trace, activity: Activity, steps: list[Window]) -> Gate:
    """Return all findings about one trace."""
    doubts = list(trace.problems)
    remarks = list(trace.remarks)
    calls = trace.rows_named(lambda name: name.startswith("nccl:"), Category.USER_ANNOTATION, Category.CPU_OP)
    blind = activity.kind != "gpu" and len(calls) > 0
    doubts += _span(trace)
    if trace.rank is None:
        remarks.append("the file does not say its rank; 0 is assumed")
    if activity.kind == "gpu":
        wrong, little = _overlapping_kernels(trace)
        doubts += [*wrong, *_lost_kernels(trace)]
        remarks += [*little, *_no_launches(activity), *_several_devices(trace)]
    else:
        doubts += _crossing_calls(trace)
    if blind:
        doubts.append(error_text("sanity.no_gpu_events"))
    if unsized := int((activity.collectives.wire < 0).sum()):
        remarks.append(error_text("sanity.unsized", unsized, len(activity.collectives)))
    doubts += _overlapping_steps(steps)
    remarks += _steps(steps)
    return Gate(tuple(doubts), tuple(remarks), not blind)


def _overlapping_kernels(trace: Trace) -> tuple[list[str], list[str]]:
    """Return doubts and remarks about kernels that run at the same time on one stream.

    A stream runs one kernel after the other; the next may begin while the last one drains (programmatic
    dependent launch), for a small part of its time.
    """
    rows = trace.rows(Category.KERNEL)
    events = trace.events
    order = np.lexsort((events.start[rows], events.stream[rows], events.device[rows]))
    rows = rows[order]
    stream, device = events.stream[rows], events.device[rows]
    same = (stream[1:] == stream[:-1]) & (device[1:] == device[:-1])
    end = events.ends(rows)
    over = np.minimum(end[:-1], end[1:]) - events.start[rows][1:]
    over = np.where(same & (over > OVERLAP_TOLERANCE_NS), over, 0)
    count = int((over > 0).sum())
    if not count:
        return [], []
    text = f"{count} of {len(rows)} kernels overlap their predecessor on the same stream"
    if int(over.sum()) > OVERLAPPING_SHARE * int(events.duration[rows].sum()):
        return [f"{text}: times are wrong"], []
    return [], [f"{text}, by little"]


def _lost_kernels(trace: Trace) -> list[str]:
    """Return a line if launches lack their kernels: profiler buffers overflowed, or the trace was thinned."""
    events = trace.events
    calls = trace.rows_named(PATTERNS["launches"].__contains__, Category.RUNTIME)
    calls = calls[events.correlation[calls] > 0]
    if not len(calls):
        return []
    kernels = events.correlation[trace.rows(Category.KERNEL, Category.MEMCPY, Category.MEMSET)]
    lost = int((~np.isin(events.correlation[calls], kernels)).sum())
    if lost <= LOST_LAUNCH_SHARE * len(calls):
        return []
    return [f"{lost} of {len(calls)} kernel launches have no kernel: device records were dropped"]


def _no_launches(activity: Activity) -> list[str]:
    unknown = int((activity.work.launch == UNKNOWN_TIME).sum())
    if not unknown:
        return []
    return [error_text("sanity.no_launch", unknown, len(activity.work.row))]


def _several_devices(trace: Trace) -> list[str]:
    devices = np.unique(trace.events.device[trace.rows(Category.KERNEL)])
    known = devices[devices >= 0].tolist()
    if len(known) < 2:
        return []
    return [f"kernels ran on devices {', '.join(map(str, known))}: overlap is over all of them together"]


def _span(trace: Trace) -> list[str]:
    span = int(trace.events.end.max()) - int(trace.events.start.min())
    if span <= LONGEST_NS:
        return []
    return [f"the events are {span / LONGEST_NS:.1f} days apart: some of their times are wrong"]


def _crossing_calls(trace: Trace) -> list[str]:
    """Return a line if calls of one thread cross: calls nest or are disjoint unless times are wrong."""
    events = trace.events
    steps = trace.rows_named(STEP.match, Category.USER_ANNOTATION)
    rows = np.concatenate([trace.rows(Category.CPU_OP), steps])
    start, end = events.start[rows], events.ends(rows)
    parent = index_spans(events.lane[rows], start, end).parents_by_row()
    inside = parent != NOTHING
    beyond = np.where(inside, end - end[parent], 0)
    # An event that begins at its parent's end follows it.
    beyond = np.where(end[parent] - start > OVERLAP_TOLERANCE_NS, beyond, 0)
    count = int((beyond > OVERLAP_TOLERANCE_NS).sum())
    if not count:
        return []
    return [f"{count} of {len(rows)} operators end after the call around them: times are wrong"]


def _overlapping_steps(steps: list[Window]) -> list[str]:
    marks = [step.mark for step in steps]
    count = sum(later.start < mark.end - OVERLAP_TOLERANCE_NS for mark, later in pairwise(marks))
    return [f"{count} of {len(marks)} steps begin before the one before them ends"] if count else []


def _steps(steps: list[Window]) -> list[str]:
    if len(steps) == 1 and not steps[0].mark.name:
        return ["the trace has no step annotations (ProfilerStep#): it counts as one step"]
    numbers = [step.index for step in steps]
    found: list[str] = []
    if len(set(numbers)) != len(numbers):
        found.append("step numbers repeat: the trace holds more than one recording")
    missing = sorted(set(range(min(numbers), max(numbers) + 1)) - set(numbers))
    if missing:
        found.append(
            f"steps {', '.join(map(str, missing[:10]))} are missing between {min(numbers)} and {max(numbers)}"
        )
    return found
