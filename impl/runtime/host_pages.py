"""Freed memory of a CPU stays with the process, as a GPU's stays with torch's allocator.

Gathered parameters and gradients come and go in megabytes. glibc returns what is free at the end of its heap
to the system once that is twice the largest block that was ever mapped by itself and freed; the system hands
it out again page by page, each cleared at its first touch. Here as much may stay as a step takes and gives
back, so a process grows to its peak and stays there.

Nothing changes where malloc is another one, or where the user decides (``MALLOC_TRIM_THRESHOLD_``).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from functools import lru_cache

from .unit import Unit

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MOST_MMAP_THRESHOLD = 32 << 20
"""Bytes; glibc takes no more. Larger blocks are mapped by themselves, and go back when freed."""
_MOST_KEPT = 1 << 30
_UNITS = 6
"""In backward: two gathered, the gradients of two, and as much on its way."""


def bytes_of_steps(units: Sequence[Unit]) -> int:
    """About what a step takes and gives back: reduced gradients, and what is whole of a few units."""
    whole = [unit.layout.full_numel * unit.precision.compute.itemsize for unit in units]
    return sum(unit.shard.nbytes for unit in units) + _UNITS * max(whole, default=0)


def keep_freed_pages(nbytes: int) -> None:
    """Let malloc keep up to ``nbytes`` of freed memory, for the process; never less than told before."""
    set_malloc = _mallopt()
    if set_malloc is not None and nbytes > _told[-1]:
        _told.append(nbytes)
        set_malloc(_M_MMAP_THRESHOLD, _MOST_MMAP_THRESHOLD)
        set_malloc(_M_TRIM_THRESHOLD, min(nbytes, _MOST_KEPT))


_told = [2 * _MOST_MMAP_THRESHOLD - 1]
"""glibc itself comes to twice the largest block; less would change nothing."""


@lru_cache(maxsize=1)
def _mallopt() -> Callable[[int, int], int] | None:
    """glibc's own function, if it is there and the user did not decide."""
    decided = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"} & os.environ.keys()
    if decided or "malloc." in os.environ.get("GLIBC_TUNABLES", ""):
        return None
    libc = ctypes.CDLL(None)
    return libc.mallopt if hasattr(libc, "gnu_get_libc_version") else None
