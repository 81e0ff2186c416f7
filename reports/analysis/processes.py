"""Parallel analysis of traces: how many processes, how they end, and how they pass on their results."""

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
"""Bytes of JSON per byte of gzip; Kineto's traces shrink to a twelfth or less."""
_MEMORY_A_BYTE = 3
"""Peak bytes of memory for analyzing a byte of JSON (measured: 2 on a million events)."""
_MEMORY_A_PROCESS = 200 << 20
_WORTH_BYTES = 100 << 20
"""Total bytes of JSON below which starting processes costs more than it saves."""


def suitable_processes(files: Sequence[Path]) -> int:
    """Return the number of processes to read `files` with, at least 1: at most the processors available to
    this process, and as many as fit into half of the free memory."""
    sizes = [_unpacked(file) for file in files]
    if len(sizes) < 2 or sum(sizes) < _WORTH_BYTES:
        return 1
    largest = max(sizes) * _MEMORY_A_BYTE + _MEMORY_A_PROCESS
    return max(1, min(len(sizes), free_memory() // 2 // largest, len(os.sched_getaffinity(0))))


@contextmanager
def interruptions_held() -> Iterator[None]:
    """Block SIGINT while processes start: one interrupted before it is ready would print a traceback."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_the_caller() -> None:
    """Make a trace-reading process end silently when it is interrupted, and when its caller ends: otherwise
    it would wait for the caller's next trace."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))
    caller = parent_process()

    def follow() -> None:
        if caller is not None:
            caller.join()
            os._exit(1)

    threading.Thread(target=follow, name="follow the caller", daemon=True).start()


def free_memory() -> int:
    """Return the bytes of memory that are free or reclaimable."""
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


# Analyzed traces, packed for the page: reading the file again takes ten times as long. They are pickles, so
# they come only from the memory of our own processes, never from a file of a run folder. A trace is
# identified by its file, which may be moved in between but not changed.

Kept = dict[tuple[int, int, int], bytes]
"""Packed traces, by the file's inode, size and modification time."""

_QUICK = 1


def pack(trace: Trace, rank: RankAnalysis) -> bytes:
    """Return a trace and its analysis packed for `kept`. Raises `OSError` if the trace's file is gone."""
    packed = zlib.compress(pickle.dumps((trace, rank), pickle.HIGHEST_PROTOCOL), _QUICK)
    return pickle.dumps((_identity(trace.path), packed), pickle.HIGHEST_PROTOCOL)


def kept(records: Iterable[bytes]) -> Kept:
    """Return all packed traces by their files' identity."""
    return dict(pickle.loads(record) for record in records)


def unpack(path: Path, kept: Kept) -> tuple[Trace, RankAnalysis] | None:
    """Return the trace at `path` and its analysis, as from `analyze_trace`; None if it is not kept."""
    try:
        packed = kept.get(_identity(path)) if kept else None
    except OSError:
        return None
    if packed is None:
        return None
    trace, rank = pickle.loads(zlib.decompress(packed))
    return replace(trace, path=path), replace(rank, path=path, configuration=None, drawing=None)


def part_of(path: Path, kept: Kept) -> Kept:
    """Return the kept entry of one trace, to pass it to another process."""
    try:
        identity = _identity(path)
    except OSError:
        return {}
    return {identity: kept[identity]} if identity in kept else {}


def _identity(path: Path) -> tuple[int, int, int]:
    about = path.stat()
    return about.st_ino, about.st_size, about.st_mtime_ns
