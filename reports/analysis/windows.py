"""Steps and phases as consecutive windows on the time axis, without gap or overlap.

The CPU marks steps and phases, but a GPU runs behind its CPU.  A window therefore ends when the last device
work *launched* in it ends, and the next begins there (or with its own mark, if the CPU is later):

    CPU      |--step 0--|--step 1--|
    device     ...#######0####|####1#######|
    windows  |     step 0     |   step 1   |
"""

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fsdpbench.reports.analysis.activity import Activity
from fsdpbench.reports.readers import Category, Trace
from fsdpbench.reports.readers.trace import Int64

STEP = re.compile(r"^ProfilerStep#(\d+)$")

_PHASES = {
    "forward": re.compile(r"^(#+ *)?forward( *#+)?$", re.IGNORECASE),
    "backward": re.compile(r"^(#+ *)?backward( *#+)?$", re.IGNORECASE),
    "optimizer": re.compile(r"^(#+ *)?optimizer( *#+)?$", re.IGNORECASE),
}
# Annotations that torch itself writes, for traces without phase annotations.
_FALLBACK_PHASES = {
    "forward": re.compile(r"^(FullyShardedDataParallel|DistributedDataParallel)\.forward$"),
    "optimizer": re.compile(r"^Optimizer\.step#"),
}
_BACKWARD_OPERATOR = "autograd::engine::evaluate_function"

OTHER_PHASE = "other"


@dataclass(frozen=True)
class Mark:
    """A span that the CPU annotated, [start, end) in ns."""

    name: str
    start: int
    end: int


@dataclass(frozen=True)
class Window:
    """A span of the device's time, [start, end) in ns; `mark`: the CPU's annotation."""

    mark: Mark
    start: int
    end: int

    @property
    def index(self) -> int:
        """Return the number of a step's window."""
        found = STEP.match(self.mark.name)
        return int(found[1]) if found else 0


def containing(marks: Sequence[Mark], times: Int64) -> Int64:
    """Return for each time (ns) the index of the mark [start, end) around it, -1 for none; marks are disjoint
    and sorted."""
    starts = np.array([mark.start for mark in marks], np.int64)
    ends = np.array([mark.end for mark in marks], np.int64)
    place = np.searchsorted(starts, times, side="right") - 1
    if not len(marks):
        return place
    return np.where((place >= 0) & (times < ends[place]), place, -1)


def step_marks(trace: Trace) -> list[Mark]:
    """Return the `ProfilerStep#k` annotations by start; empty if the trace has none."""
    found = trace.parsed_annotations(lambda name: name if STEP.search(name) else None)
    return [Mark(name, start, end) for name, start, end, _ in found]


def step_windows(trace: Trace, activity: Activity) -> list[Window]:
    """Return the steps' windows; a single one over the whole trace if there are no step annotations."""
    marks = step_marks(trace)
    if not marks:
        seen = activity.work if len(activity.work.row) else trace.events
        start, end = int(seen.start.min()), int(seen.end.max())
        # All work was launched within it: the launches of the first kernels precede the first kernel.
        asked = activity.work.asked()
        first, last = int(asked.min(initial=start)), int(asked.max(initial=end - 1)) + 1
        return [Window(Mark("", min(first, start), max(last, end)), start, end)]
    windows: list[Window] = []
    reach = marks[0].start
    for mark, busy_until in zip(marks, _last_ends(marks, activity), strict=True):
        start = max(reach, mark.start)
        reach = max(start, mark.end, busy_until)
        windows.append(Window(mark, start, reach))
    # Time between two steps belongs to the earlier one, so that steps add up to the run.
    ends = [*(window.start for window in windows[1:]), reach]
    return [replace(window, end=end) for window, end in zip(windows, ends, strict=True)]


def phase_windows(marks: list[Mark], activity: Activity, steps: list[Window]) -> list[list[Window]]:
    """Return for each step the windows of its phases (`phase_marks`), in order, disjoint."""
    busy = _last_ends(marks, activity)
    starts = [mark.start for mark in marks]
    found: list[list[Window]] = []
    for step in steps:
        low, high = bisect_left(starts, step.mark.start), bisect_left(starts, step.mark.end)
        windows: list[Window] = []
        reach = step.start
        for mark, busy_until in zip(marks[low:high], busy[low:high], strict=True):
            start = min(max(reach, mark.start), step.end)
            reach = min(max(start, mark.end, busy_until), step.end)
            windows.append(Window(mark, start, reach))
        found.append(windows)
    return found


def phase_marks(trace: Trace) -> list[Mark]:
    """Return forward, backward and optimizer spans on the CPU by start; nested spans are left out."""
    marks = _marks(trace, _PHASES)
    present = {mark.name for mark in marks}
    fallback = {name: pattern for name, pattern in _FALLBACK_PHASES.items() if name not in present}
    marks += _marks(trace, fallback)
    if marks and "backward" not in present:
        marks += _backward_from_autograd(trace)
    marks.sort(key=lambda mark: (mark.start, -mark.end))
    outermost: list[Mark] = []
    for mark in marks:
        if not outermost or mark.start >= outermost[-1].end:
            outermost.append(mark)
    return outermost


def _marks(trace: Trace, patterns: dict[str, re.Pattern[str]]) -> list[Mark]:
    """Return the annotations that match a pattern, named by its key, in order of their start."""

    def phase_of(name: str) -> str | None:
        return next((phase for phase, pattern in patterns.items() if pattern.search(name)), None)

    return [Mark(name, start, end) for name, start, end, _ in trace.parsed_annotations(phase_of)]


def _backward_from_autograd(trace: Trace) -> list[Mark]:
    """Return one span per step around autograd's own operators."""
    rows = trace.rows_named(lambda name: name.startswith(_BACKWARD_OPERATOR), Category.CPU_OP)
    start, end = trace.events.start[rows], trace.events.ends(rows)
    spans = [(mark.start, mark.end) for mark in step_marks(trace)]
    found: list[Mark] = []
    for low, high in spans or [(int(start.min(initial=0)), int(end.max(initial=0)) + 1)]:
        inside = (start >= low) & (start < high)
        if inside.any():
            found.append(Mark("backward", int(start[inside].min()), int(end[inside].max())))
    return found


def _last_ends(marks: list[Mark], activity: Activity) -> list[int]:
    """Return for each mark the end (ns) of the last device work launched in it, or the mark's start.

    On a CPU trace work runs where it is called, so the marks themselves are exact."""
    last = np.fromiter((mark.start for mark in marks), np.int64, len(marks))
    if activity.kind == "cpu" or not len(activity.work.row) or not marks:
        return [mark.start for mark in marks]
    asked, end = activity.work.asked(), activity.work.end
    place = np.searchsorted(last, asked, side="right") - 1
    ends = np.fromiter((mark.end for mark in marks), np.int64, len(marks))
    inside = (place >= 0) & (asked < ends[np.maximum(place, 0)])
    np.maximum.at(last, place[inside], end[inside])
    return last.tolist()
