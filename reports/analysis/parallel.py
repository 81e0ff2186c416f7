"""How many traces to read at a time: as many as there are processors, and as memory allows."""

from __future__ import annotations

import os
import signal
import stat
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import parent_process
from pathlib import Path

_UNPACKS_TO = 15
"""Bytes of JSON from a byte of gzip; Kineto's traces shrink to a twelfth or less."""
_MEMORY_A_BYTE = 3
"""Bytes of memory that analysing a byte of JSON takes at most (measured: 2 on a million events)."""
_MEMORY_A_PROCESS = 200 << 20
_WORTH_BYTES = 100 << 20
"""Below so much JSON in all, starting processes costs more than it saves."""


def suitable_processes(
    files: Sequence[Path], *, processors: int | None = None, memory: int | None = None
) -> int:
    """Processes to read `files` with, at least 1.

    Args:
        processors: those that this process may use, unless given.
        memory: bytes that may be used; half of what is free, unless given.
    """
    sizes = [_unpacked(file) for file in files]
    if len(sizes) < 2 or sum(sizes) < _WORTH_BYTES:
        return 1
    largest = max(sizes) * _MEMORY_A_BYTE + _MEMORY_A_PROCESS
    by_memory = (free_memory() // 2 if memory is None else memory) // largest
    return max(1, min(len(sizes), by_memory, processors or len(os.sched_getaffinity(0))))


@contextmanager
def interruptions_held() -> Iterator[None]:
    """While processes are started: one that is told to end before it listens would print where it was."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_the_caller() -> None:
    """In a process that reads traces: interrupted it ends silently, and it does not outlive its caller,
    for whose next trace it would wait."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))
    caller = parent_process()

    def follow() -> None:
        if caller is not None:
            caller.join()
            os._exit(1)

    threading.Thread(target=follow, name="follow the caller", daemon=True).start()


def free_memory() -> int:
    """Bytes that are free or can be made so."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except OSError:
        pass
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _unpacked(file: Path) -> int:
    try:
        state = file.stat()
        if not stat.S_ISREG(state.st_mode):
            return 0  # opening a pipe would wait for its other end
        size = state.st_size
        with file.open("rb") as opened:
            packed = opened.read(2) == b"\x1f\x8b"
    except (OSError, ValueError):
        return 0
    return size * (_UNPACKS_TO if packed else 1)
