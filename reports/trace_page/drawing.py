"""What the page draws of one rank, made while its trace is in memory."""

from __future__ import annotations

from typing import Any

from fsdpbench.reports.analysis import RankAnalysis
from fsdpbench.reports.page.trace_parts import trace_parts
from fsdpbench.reports.trace import Trace

_MOST_EVENTS = 6_000
_EVENTS_IN_ALL = 120_000
_LARGEST_MEMORY = 1 << 50


def draw_rank(trace: Trace, rank: RankAnalysis, *, traces: int) -> dict[str, Any]:
    """The rank's part in plain JSON values, of a page of so many `traces`."""
    most = max(300, min(_MOST_EVENTS, _EVENTS_IN_ALL // max(traces, 1)))
    told = [device.get("totalGlobalMem") for device in trace.devices]
    sizes = {size for size in told if isinstance(size, int) and 0 < size < _LARGEST_MEMORY}
    known = float(sizes.pop()) if len(sizes) == 1 else None
    names = {str(device["name"])[:80] for device in trace.devices if device.get("name")}
    return trace_parts(trace, rank, known, most) | {"device_names": sorted(names)}
