"""To which FSDP unit any device work belongs: collectives by the annotation around their launch, computation
by the unit whose forward or backward was running on the CPU when it was launched.

A unit's forward runs between its `pre_forward` and its `post_forward`, its backward between `pre_backward`
and `post_backward`:

    pre_forward (root)  pre_forward (b.0)  kernels  post_forward (b.0)  kernels  post_forward (root)
                        |------------- b.0 ---------------------------|
    |---------------------------------- root ------------------------------------------------------|
"""

from __future__ import annotations

import numpy as np

from fsdpbench.reports.analysis.device.activity import Work
from fsdpbench.reports.analysis.device.units import NOTHING, FsdpSpans, SpanIndex, index_spans, unit_of
from fsdpbench.reports.trace import MISSING
from fsdpbench.reports.trace.model import Int32, Int64

_OPENS = {"pre_forward": "forward", "pre_backward": "backward"}
_CLOSES = {
    "post_forward": "forward",
    "post_backward": "backward",
    # torch's FSDP2 writes no post_backward; its reshard comes when the unit's gradients are there.
    "post_backward_reshard": "backward",
}


def running_spans(spans: FsdpSpans) -> tuple[Int32, Int64, Int64, Int32]:
    """Columns (lane, start, end, unit) of the stretches in which a unit's own code runs on the CPU."""
    found: list[tuple[int, int, int, int]] = []
    open_at: dict[tuple[str, int], tuple[int, int]] = {}
    for event, unit, lane, start, end in zip(
        spans.event.tolist(),
        spans.unit.tolist(),
        spans.lane.tolist(),
        spans.start.tolist(),
        spans.end.tolist(),
        strict=True,
    ):
        name = spans.events[event]
        if name in _OPENS:
            # The first opening counts: a unit with several outputs may announce its backward more than once.
            open_at.setdefault((_OPENS[name], unit), (lane, start))
        elif name in _CLOSES and (_CLOSES[name], unit) in open_at:
            opened_lane, opened = open_at.pop((_CLOSES[name], unit))
            if opened_lane == lane:
                found.append((lane, opened, end, unit))
    columns = np.array(found, np.int64).reshape(-1, 4)
    return columns[:, 0].astype(np.int32), columns[:, 1], columns[:, 2], columns[:, 3].astype(np.int32)


def running_index(spans: FsdpSpans) -> tuple[SpanIndex, Int32]:
    """The stretches of `running_spans`, indexed, and the unit of each."""
    lane, start, end, unit = running_spans(spans)
    return index_spans(lane, start, end), unit


def unit_of_work(spans: FsdpSpans, work: Work) -> Int32:
    """For each event: index into `spans.units`, or MISSING."""
    unit = unit_of(spans, work.launch_lane, work.launch)
    index, running = running_index(spans)
    place = index.innermost(work.launch_lane, work.launch)
    use = (unit == MISSING) & (place != NOTHING)
    unit[use] = running[place[use]]
    return unit
