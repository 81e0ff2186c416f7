"""Reading traces: any Kineto JSON file to numpy columns."""

from fsdpbench.reports.trace.dtypes import dtype_bytes
from fsdpbench.reports.trace.limits import TraceLimits
from fsdpbench.reports.trace.model import (
    MISSING,
    Category,
    CollectiveInfo,
    Events,
    MemoryEvents,
    OperatorCall,
    RetryEvents,
    Trace,
    TraceError,
)
from fsdpbench.reports.trace.reader import read_trace

__all__ = [
    "MISSING",
    "Category",
    "CollectiveInfo",
    "Events",
    "MemoryEvents",
    "OperatorCall",
    "RetryEvents",
    "Trace",
    "TraceError",
    "TraceLimits",
    "dtype_bytes",
    "read_trace",
]
