"""Reading traces: any Kineto JSON file to numpy columns."""

from fsdpbench.reports.readers.trace import (
    MISSING,
    Category,
    CollectiveInfo,
    MemoryEvents,
    OperatorCall,
    Trace,
    TraceError,
    TraceLimits,
    dtype_bytes,
)
from fsdpbench.reports.readers.trace_reader import read_trace
