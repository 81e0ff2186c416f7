"""Calls of the driver and its runtime on the CPU that take time of their own: allocation, synchronisation."""

from __future__ import annotations

import numpy as np

from fsdpbench.reports import intervals
from fsdpbench.reports.intervals import Intervals
from fsdpbench.reports.trace import Category, Trace
from fsdpbench.reports.trace.model import Int64

_ALLOCATING = frozenset(
    {
        "cudaMalloc",
        "cudaFree",
        "hipMalloc",
        "hipFree",
        "cuMemCreate",
        "cuMemMap",
        "cuMemUnmap",
        "cuMemRelease",
    }
)
_SYNCHRONIZING = frozenset(
    f"{prefix}{what}Synchronize" for prefix in ("cuda", "hip") for what in ("Device", "Stream", "Event")
)


def allocator_rows(trace: Trace) -> Int64:
    """Rows of the driver's allocation calls, in order of their start."""
    return _rows(trace, _ALLOCATING)


def allocator_calls(trace: Trace) -> Intervals:
    """When the CPU was in the driver's allocation calls."""
    return _times(trace, allocator_rows(trace))


def synchronizing_calls(trace: Trace) -> Intervals:
    """When the CPU waited for the device."""
    return _times(trace, _rows(trace, _SYNCHRONIZING))


def _rows(trace: Trace, wanted: frozenset[str]) -> Int64:
    named = np.fromiter((name in wanted for name in trace.names), np.bool_, len(trace.names))
    rows = trace.rows(Category.RUNTIME)
    rows = rows[named[trace.events.name[rows]]]
    return rows[np.argsort(trace.events.start[rows], kind="stable")]


def _times(trace: Trace, rows: Int64) -> Intervals:
    return intervals.of(trace.events.start[rows], trace.events.end[rows])
