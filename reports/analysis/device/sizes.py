"""Bytes of a collective: the full buffer, and what crosses the wire.

Wire bytes follow nccl-tests' "bus bandwidth" (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md): for n ranks
and a full buffer of S bytes, all-gather, reduce-scatter and all-to-all send S (n-1)/n, all-reduce twice that,
broadcast, reduce and send/recv S.
"""

from __future__ import annotations

from fsdpbench.reports.analysis.device.naming import CollectiveType
from fsdpbench.reports.trace import CollectiveInfo, dtype_bytes

_MOST_BYTES = 1 << 45
"""No collective carries more; a trace that says so is not believed."""


def message_bytes(kind: CollectiveType, info: CollectiveInfo, world_size: int | None) -> int | None:
    """Bytes of the full buffer (gathered, or before reduction); None when the trace does not tell."""
    size = _said_bytes(kind, info, world_size)
    return size if size is not None and size <= _MOST_BYTES else None


def _said_bytes(kind: CollectiveType, info: CollectiveInfo, world_size: int | None) -> int | None:
    size = dtype_bytes(info.dtype)
    if size is None:
        return None
    ranks = info.group_size or world_size
    if kind is CollectiveType.ALL_GATHER:
        if info.out_elements:
            return info.out_elements * size
        return info.in_elements * ranks * size if info.in_elements and ranks else None
    elements = max(info.in_elements or 0, info.out_elements or 0)
    return elements * size if elements else None


def with_own_part(sent: int | None, ranks: int | None) -> int | None:
    """The full buffer of a reduction of which `sent` is what goes to the other ranks."""
    return None if sent is None or not ranks or ranks < 2 else sent * ranks // (ranks - 1)


def wire_bytes(kind: CollectiveType, message: int, ranks: int | None) -> int | None:
    """Bytes that each rank sends; None when the number of ranks is unknown."""
    if kind in (CollectiveType.BROADCAST, CollectiveType.REDUCE, CollectiveType.SEND_RECV):
        return message
    if not ranks:
        return None
    times = 2 if kind is CollectiveType.ALL_REDUCE else 1
    return times * message * (ranks - 1) // ranks
