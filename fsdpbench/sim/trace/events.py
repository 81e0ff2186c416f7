"""What the recorder keeps of each event: plain tuples, because millions of them are made."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any


class HostKind(IntEnum):
    """What a span of the CPU thread is."""

    OPERATOR = 0
    ANNOTATION = 1
    RUNTIME = 2


# (start ns, -end ns, -serial, kind, name, correlation or 0, inputs as JSON members). Sorting these
# puts an outer span before the inner ones: earlier start, then later end, then recorded later (a span is
# recorded when it ends).
HostEvent = tuple[int, int, int, HostKind, str, int, str]

# (category, name, stream, start ns, end ns, correlation, further arguments)
DeviceEvent = tuple[str, str, int, int, int, int, Mapping[str, Any] | None]

# (name, stream or -1, start ns, end ns, correlation, event id, stream of the record, correlation of the
# record)
CudaSync = tuple[str, int, int, int, int, int | None, int | None, int | None]

# (time ns, address, signed bytes, total allocated, total active or -1, total reserved)
MemoryEvent = tuple[int, int, int, int, int, int]

# (name, time ns, arguments)
InstantEvent = tuple[str, int, Mapping[str, Any]]
