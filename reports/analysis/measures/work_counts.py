"""How much work there was, counted rather than timed: what a regression gate can name exactly.

An extra copy or a lost wait moves a step by less than noise does on real hardware; its count is off by one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fsdpbench.reports.analysis.device.activity import Activity
from fsdpbench.reports.analysis.device.units import FsdpSpans
from fsdpbench.reports.analysis.device.windows import Window
from fsdpbench.reports.analysis.measures.fused_kernels import moves_only
from fsdpbench.reports.trace import Trace
from fsdpbench.reports.trace.model import Int64

_COPY = re.compile(r"copy|clone|CatArray|_cat_|(^|_)stack_", re.IGNORECASE)
_LIMITER = "limiter_wait"


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
        """A mean step's; a whole number where steps are alike."""
        counts = {"kernels": self.kernels, "copies": self.copies, "limiter_waits": self.limiter_waits}
        return {name: n // steps if n % steps == 0 else n / steps for name, n in counts.items()}


def count_work(trace: Trace, activity: Activity, spans: FsdpSpans, windows: Sequence[Window]) -> WorkCounts:
    """Counts what was launched inside the steps that the CPU annotated."""
    work = activity.work
    inside = _inside(work.asked(), windows)
    copying = np.fromiter((_is_copy(name) for name in trace.names), np.bool_, len(trace.names))
    computing = inside & ~work.is_communication & ~work.is_copy
    moving = inside & (work.is_copy | (computing & copying[trace.events.name[work.row]]))
    waits = 0
    if _LIMITER in spans.events:
        asked = spans.start[spans.event == spans.events.index(_LIMITER)]
        waits = int(_inside(asked, windows).sum())
    return WorkCounts(int(computing.sum()), int(moving.sum()), waits)


def _is_copy(name: str) -> bool:
    fused = moves_only(name)
    return bool(_COPY.search(name)) if fused is None else fused


def _inside(times: Int64, windows: Sequence[Window]) -> np.ndarray:
    """Mask over `times`: launched within the marks of the windows."""
    starts = np.array([window.mark.start for window in windows], np.int64)
    ends = np.array([window.mark.end for window in windows], np.int64)
    place = np.searchsorted(starts, times, side="right") - 1
    inside: np.ndarray = (place >= 0) & (times < ends[np.maximum(place, 0)])
    return inside
