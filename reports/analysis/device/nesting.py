"""Which of a set of nested spans encloses a point in time, on which thread.

Spans of one thread nest, as calls do; so the innermost span around a point is the last one to begin before
it, or one of that span's ancestors:

    |--------- a ----------|
       |-- b --|   |- c -|
             ^ b      ^ c  ^ a        (after c: the last to begin is c, which has ended; its parent a holds)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fsdpbench.reports.trace.model import Int32, Int64

NOTHING = -1


@dataclass(frozen=True, eq=False)
class SpanIndex:
    """Spans sorted by lane, start and (longest first) end; `row` says which row of the input each was."""

    lane: Int64
    start: Int64
    end: Int64
    parent: Int64
    row: Int64

    def innermost(self, lane: Int32 | Int64, time: Int64) -> Int64:
        """The input row of the innermost span [start, end] around each point (lane, time), or NOTHING."""
        found = np.full(len(time), NOTHING, np.int64)
        for each in np.unique(self.lane):
            low, high = np.searchsorted(self.lane, [each, each + 1])
            points = np.flatnonzero(lane == each)
            if len(points) == 0:
                continue
            at = time[points]
            span = low + np.searchsorted(self.start[low:high], at, side="right") - 1
            span[span < low] = NOTHING
            # Climb until the span reaches far enough; nesting is a few levels deep.
            while True:
                ended = (span != NOTHING) & (self.end[span] < at)
                if not ended.any():
                    break
                span[ended] = self.parent[span[ended]]
            found[points] = np.where(span == NOTHING, NOTHING, self.row[span])
        return found

    def parents_by_row(self) -> Int64:
        """For each input row: the input row of the span around it, or NOTHING."""
        parents = np.full(len(self.row), NOTHING, np.int64)
        known = self.parent != NOTHING
        parents[self.row[known]] = self.row[self.parent[known]]
        return parents


def index_spans(
    lane: Int32 | Int64, start: Int64, end: Int64, rank: Int32 | Int64 | None = None
) -> SpanIndex:
    """Sorts the spans and finds each one's parent: the innermost earlier one that has not ended.

    Of spans that begin and end together the one of lower `rank` is outside; without ranks the earlier row.
    """
    order = np.lexsort((-end, start, lane) if rank is None else (rank, -end, start, lane))
    lane_list, start_list, end_list = lane[order].tolist(), start[order].tolist(), end[order].tolist()
    parent = np.full(len(order), NOTHING, np.int64)
    stack: list[int] = []
    for i, (this_lane, begin) in enumerate(zip(lane_list, start_list, strict=True)):
        while stack and (lane_list[stack[-1]] != this_lane or end_list[stack[-1]] < begin):
            stack.pop()
        if stack:
            parent[i] = stack[-1]
        stack.append(i)
    return SpanIndex(lane[order].astype(np.int64), start[order], end[order], parent, order.astype(np.int64))
