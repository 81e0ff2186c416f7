"""Several processes that analyse traces: how many, how they end, and what they hand to others."""

import os
import pickle
import signal
import stat
import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import parent_process
from pathlib import Path

from fsdpbench.base.numbers import proc_figure
from fsdpbench.reports.analysis.model import RankAnalysis
from fsdpbench.reports.readers import Trace

_UNPACKS_TO = 15
"""Bytes of JSON from a byte of gzip; Kineto's traces shrink to a twelfth or less."""
_MEMORY_A_BYTE = 3
"""Bytes of memory that analysing a byte of JSON takes at most (measured: 2 on a million events)."""
_MEMORY_A_PROCESS = 200 << 20
_WORTH_BYTES = 100 << 20
"""Below so much JSON in all, starting processes costs more than it saves."""


def suitable_processes(files: Sequence[Path]) -> int:
    """Return the number of processes to read `files` with, at least 1: they have the processors that this one
    may use, and half of the memory that is free."""
    sizes = [_unpacked(file) for file in files]
    if len(sizes) < 2 or sum(sizes) < _WORTH_BYTES:
        return 1
    largest = max(sizes) * _MEMORY_A_BYTE + _MEMORY_A_PROCESS
    return max(1, min(len(sizes), free_memory() // 2 // largest, len(os.sched_getaffinity(0))))


@contextmanager
def interruptions_held() -> Iterator[None]:
    """Hold SIGINT while processes start: interrupted before it listens, one would print a traceback."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_the_caller() -> None:
    """Make a process that reads traces end silently when interrupted, and when its caller ends: it would wait
    for the caller's next trace."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))
    caller = parent_process()

    def follow() -> None:
        if caller is not None:
            caller.join()
            os._exit(1)

    threading.Thread(target=follow, name="follow the caller", daemon=True).start()


def free_memory() -> int:
    """Return the bytes of memory that are free or can be made so."""
    found = proc_figure("meminfo", "MemAvailable:")
    return found << 10 if found else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


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


# Analysed traces, packed for the page: reading the file again takes ten times as long. They are pickles, so
# they come from the memory of our own processes alone, never from a file of a run folder. A trace is known by
# its file, which may be moved meanwhile, but not changed.

Kept = dict[tuple[int, int, int], bytes]
"""Packed, by the file's number, size and time of change."""

_QUICK = 1


def pack(trace: Trace, rank: RankAnalysis) -> bytes:
    """Return a trace and its analysis packed for `kept`. Raises `OSError` where the trace's file is gone."""
    packed = zlib.compress(pickle.dumps((trace, rank), pickle.HIGHEST_PROTOCOL), _QUICK)
    return pickle.dumps((_identity(trace.path), packed), pickle.HIGHEST_PROTOCOL)


def kept(records: Iterable[bytes]) -> Kept:
    """Return all packed traces by their files' identity."""
    return dict(pickle.loads(record) for record in records)


def unpack(path: Path, kept: Kept) -> tuple[Trace, RankAnalysis] | None:
    """Return the trace at `path` and its analysis, as `analyze_trace` makes it; None where it is not kept."""
    try:
        packed = kept.get(_identity(path)) if kept else None
    except OSError:
        return None
    if packed is None:
        return None
    trace, rank = pickle.loads(zlib.decompress(packed))
    return replace(trace, path=path), replace(rank, path=path, configuration=None, drawing=None)


def part_of(path: Path, kept: Kept) -> Kept:
    """Return the kept part of one trace, to be handed to another process."""
    try:
        identity = _identity(path)
    except OSError:
        return {}
    return {identity: kept[identity]} if identity in kept else {}


def _identity(path: Path) -> tuple[int, int, int]:
    about = path.stat()
    return about.st_ino, about.st_size, about.st_mtime_ns
