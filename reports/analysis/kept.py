"""Analysed traces, packed for those that need them next: reading the file again takes ten times as long.

They are pickles, so they are taken from the memory of one's own processes alone, never from a file of a run
folder. A trace is known by its file, which may be moved meanwhile, but not changed.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from fsdpbench.reports.analysis.model import RankAnalysis
from fsdpbench.reports.trace import Trace

Kept = dict[tuple[int, int, int], bytes]
"""Packed, by the file's number, size and time of change."""

_QUICK = 1


def pack(trace: Trace, rank: RankAnalysis) -> bytes:
    """What `kept` reads. Raises `OSError` where the trace's file is gone."""
    packed = zlib.compress(pickle.dumps((trace, rank), pickle.HIGHEST_PROTOCOL), _QUICK)
    return pickle.dumps((_identity(trace.path), packed), pickle.HIGHEST_PROTOCOL)


def kept(records: Iterable[bytes]) -> Kept:
    """All that was packed."""
    return dict(pickle.loads(record) for record in records)


def unpack(path: Path, kept: Kept) -> tuple[Trace, RankAnalysis] | None:
    """The trace at `path` and its analysis, as `analyze_trace` makes it; None where it is not kept."""
    try:
        packed = kept.get(_identity(path)) if kept else None
    except OSError:
        return None
    if packed is None:
        return None
    trace, rank = pickle.loads(zlib.decompress(packed))
    return replace(trace, path=path), replace(rank, path=path, configuration=None, drawing=None)


def part_of(path: Path, kept: Kept) -> Kept:
    """What is kept of one trace, to be handed to another process."""
    try:
        identity = _identity(path)
    except OSError:
        return {}
    return {identity: kept[identity]} if identity in kept else {}


def _identity(path: Path) -> tuple[int, int, int]:
    about = path.stat()
    return about.st_ino, about.st_size, about.st_mtime_ns
