"""An upper bound on what a piece of foreign code may allocate, kept by the operating system.

Python's own unpickler makes room for as many objects as a file names by number, before it has seen one of
them: six bytes ask for gigabytes.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def bounded_memory(more: int) -> Iterator[None]:
    """MemoryError inside where this process asks for `more` bytes beyond what it has.

    It holds for the whole process, all threads. Where the system does not tell what a process has, nothing is
    bounded.
    """
    has = _address_space()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    bound = has + more
    if not has or (soft != resource.RLIM_INFINITY and soft <= bound):
        yield
        return
    resource.setrlimit(resource.RLIMIT_AS, (bound, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _address_space() -> int:
    """Bytes of this process's address space; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return 0
