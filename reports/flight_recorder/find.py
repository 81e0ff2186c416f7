"""Which files are dumps of the Flight Recorder, by what is in them; the rank is the number in their name."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from fsdpbench.reports.trace import TraceError

_RANK = re.compile(r"(\d{1,9})(?:\.(?:json|pickle|pkl|bin|dump|dat))?$")
_HEAD = 1 << 16
_DEPTH = 2
_MOST_FILES = 100_000
_WORDS = (b"pg_config", b"pg_status", b"profiling_name", b"nccl_comm_state")
_OTHERS = (b"traceEvents", b"device_traces")


def find_dumps(paths: Sequence[Path]) -> dict[int, Path]:
    """The dumps among `paths` and in the folders among them, by rank; empty if there are none.

    Raises:
        TraceError: two dumps of one rank, one whose name says no rank, or dumps beside other files.
    """
    found: dict[int, Path] = {}
    others = []
    for path in paths:
        dumps = list(_in_folder(path)) if path.is_dir() else [path] if _is_dump(path) else []
        if not dumps:
            others.append(path)
        for dump in dumps:
            rank = _rank(dump)
            if rank in found and found[rank].resolve() != dump.resolve():
                raise TraceError(
                    dump, f"is a second dump of rank {rank}, beside {found[rank]}: give one job's"
                )
            found[rank] = dump
    if found and others:
        raise TraceError(others[0], "is not a Flight Recorder dump like the others: analyze it separately")
    return dict(sorted(found.items()))


def _rank(path: Path) -> int:
    match = _RANK.search(path.name)
    if match is None:
        reason = "is a Flight Recorder dump whose name ends in no rank (as nccl_trace_rank_3 does): rename it"
        raise TraceError(path, reason)
    return int(match[1])


def _in_folder(folder: Path) -> Iterator[Path]:
    seen = 0
    try:
        for place, folders, names in os.walk(folder):
            if len(Path(place).relative_to(folder).parts) >= _DEPTH:
                folders.clear()
            seen += len(names)
            if seen > _MOST_FILES:
                return
            yield from (
                path
                for path in (Path(place, name) for name in sorted(names) if _RANK.search(name))
                if _is_dump(path)
            )
    except (OSError, ValueError):
        return  # the reader of traces says what is wrong with it


def _is_dump(path: Path) -> bool:
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            head = file.read(2)
            if head[:1] != b"\x80" and not head.lstrip().startswith(b"{"):
                return False
            head += file.read(_HEAD)
    except (OSError, ValueError):
        return False
    return any(word in head for word in _WORDS) and not any(word in head for word in _OTHERS)
