"""Allocated, active and reserved memory over time, from a trace's memory events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fsdpbench.reports.analysis.device_time import Clock
from fsdpbench.reports.analysis.measures.memory import device_events
from fsdpbench.reports.trace import Trace
from fsdpbench.reports.trace.model import Int64

MAX_POINTS = 2000


@dataclass(frozen=True, eq=False)
class MemoryCurve:
    """int64 columns: time (ns after the trace's first event), allocated, active (empty where the trace does
    not tell it) and reserved (bytes); and the retries' times, the bytes asked for and the bytes that the
    retry freed."""

    time: Int64
    allocated: Int64
    reserved: Int64
    retry_time: Int64
    retry_bytes: Int64
    retry_freed: Int64
    active: Int64

    def __len__(self) -> int:
        return len(self.time)

    def to_dict(self) -> dict[str, Any]:
        return {
            "time_ns": self.time.tolist(),
            "allocated_bytes": self.allocated.tolist(),
            "reserved_bytes": self.reserved.tolist(),
            "active_bytes": self.active.tolist() or None,
            "retries": [
                {"time_ns": time, "bytes": size, "freed_bytes": freed}
                for time, size, freed in zip(
                    self.retry_time.tolist(),
                    self.retry_bytes.tolist(),
                    self.retry_freed.tolist(),
                    strict=True,
                )
            ],
        }


def memory_curve(
    trace: Trace, *, max_points: int = MAX_POINTS, origin: int | None = None, clock: Clock | None = None
) -> MemoryCurve:
    """The accelerator's curve, or the host's where the trace has no accelerator's memory events.

    Thinned to about `max_points`: from each stretch of events the highest and the lowest allocation stay, and
    the highest reservation, so that peaks keep their place and height. `origin`: ns that counts as 0, by
    default the start of the trace's first event. `clock`: by which times are told (`device_clock`), by
    default the CPU's, which allocates.
    """
    memory = trace.memory
    mask = device_events(trace)
    told_by = clock or (lambda times: times)
    time, allocated, reserved = told_by(memory.time[mask]), memory.allocated[mask], memory.reserved[mask]
    kept = _keep(allocated, reserved, max_points)
    active = memory.active[mask]
    told = len(active) > 0 and int(active.min()) >= 0
    start = int(trace.events.start.min()) if origin is None else origin
    return MemoryCurve(
        time[kept] - start,
        allocated[kept],
        reserved[kept],
        told_by(trace.retries.time) - start,
        trace.retries.bytes,
        trace.retries.freed,
        active[kept] if told else active[:0],
    )


def _keep(allocated: Int64, reserved: Int64, most: int) -> Int64:
    count = len(allocated)
    if count <= most:
        return np.arange(count)
    # Three points a stretch at most, and both ends of the curve.
    edges = np.linspace(0, count, max(most // 3, 1) + 1).astype(np.int64)
    kept = {0, count - 1}
    for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        if high > low:
            kept.add(low + int(np.argmax(allocated[low:high])))
            kept.add(low + int(np.argmin(allocated[low:high])))
            kept.add(low + int(np.argmax(reserved[low:high])))
    return np.array(sorted(kept), np.int64)
