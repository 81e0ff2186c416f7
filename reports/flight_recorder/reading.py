"""A dump's bytes as a `Dump`: a pickle of plain values as torch writes it, or the JSON of the same.

Nothing of the file is trusted: classes in a pickle are refused, sizes are bounded, and a value of another
type than torch writes reads as if it were not there.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdpbench.reports.flight_recorder.dump import Dump, Entry, Frame, GroupName, GroupStatus
from fsdpbench.reports.hta_text import one_line
from fsdpbench.reports.plain_pickle import load_plain
from fsdpbench.reports.reading import LARGEST_INTEGER, UnreadableError, parse_json, read_bytes
from fsdpbench.reports.trace import TraceError

LARGEST_DUMP = 256 << 20
_MOST_ENTRIES = 1_000_000
_MOST_FRAMES = 64
_MOST_TENSORS = 10_000
_MOST_DIMENSIONS = 64
_LONGEST_NAME = 300
_MOST_RANKS = 1 << 20
_STATES = ("scheduled", "started", "completed")


def read_dump(path: Path, rank: int) -> Dump:
    """The dump of `rank`.

    Raises:
        TraceError: in one line, what is wrong with the file.
    """
    content = _content(path)
    if not isinstance(content, Mapping) or not isinstance(content.get("entries"), (list, tuple)):
        raise TraceError(path, "is not a Flight Recorder dump with collectives (it has no list of entries)")
    raw = content["entries"]
    if len(raw) > _MOST_ENTRIES:
        raise TraceError(path, f"has {len(raw):,} entries; {_MOST_ENTRIES:,} are the most that are read")
    entries = [(_entry(each), _number(each.get("record_id"), 0)) for each in raw if isinstance(each, Mapping)]
    if raw and not entries:
        raise TraceError(path, "has entries that are not records of collectives")
    return Dump(
        path=path,
        rank=rank,
        version=_text(content.get("version"), "unknown"),
        entries=tuple(entry for entry, _ in entries),
        members=_members(content.get("pg_config")),
        status=_status(content.get("pg_status")),
        is_cut=min((number for _, number in entries), default=0) > 0,
    )


def _content(path: Path) -> Any:
    try:
        data = read_bytes(path, LARGEST_DUMP)
        if not data.startswith(b"\x80"):
            return parse_json(data, str(path))
    except UnreadableError as error:
        raise TraceError(path, error.reason) from None
    try:
        return load_plain(io.BytesIO(data), len(data))
    except MemoryError:
        reason = "is not a Flight Recorder dump (it asks for more memory than its size explains)"
    except EOFError:
        reason = "is truncated: the pickle ends in the middle"
    except Exception as error:  # damaged pickles raise nearly anything
        told = "truncated" if "truncated" in str(error) else one_line(error, 200)
        reason = f"is a damaged Flight Recorder dump ({told})"
    raise TraceError(path, reason)


def _entry(raw: Mapping[str, Any]) -> Entry:
    group = raw.get("process_group")
    if not isinstance(group, (list, tuple)) or len(group) < 2:
        group = (raw.get("pg_id"), "")
    backend, separator, kind = _text(raw.get("profiling_name"), "unknown").partition(":")
    state = _text(raw.get("state"), "unknown")
    return Entry(
        group=GroupName(_text(group[0], "?"), _text(group[1], "")),
        sequence=_number(raw.get("collective_seq_id", raw.get("seq_id")), 0),
        backend=backend if separator else "",
        kind=kind if separator else backend,
        input_sizes=_sizes(raw.get("input_sizes")),
        output_sizes=_sizes(raw.get("output_sizes")),
        input_dtypes=_texts(raw.get("input_dtypes")),
        output_dtypes=_texts(raw.get("output_dtypes")),
        state=state if state in _STATES else "unknown",
        is_p2p=raw.get("is_p2p") is True,
        created_ns=_number(raw.get("time_created_ns"), 0),
        frames=_frames(raw.get("frames")),
    )


def _frames(raw: Any) -> tuple[Frame, ...]:
    if not isinstance(raw, (list, tuple)):
        return ()
    return tuple(
        Frame(_text(each.get("filename"), "?"), _number(each.get("line"), 0), _text(each.get("name"), "?"))
        for each in raw[:_MOST_FRAMES]
        if isinstance(each, Mapping)
    )


def _members(raw: Any) -> dict[str, tuple[int, ...]]:
    """The ranks of groups. They are written as a text: `"[0, 1, 2]"`. gloo writes an empty name: left out."""
    found = {}
    for name, config in raw.items() if isinstance(raw, Mapping) else ():
        ranks = config.get("ranks") if isinstance(config, Mapping) else None
        if isinstance(ranks, str) and len(ranks) < 16 * _MOST_RANKS:
            ranks = [int(number) for number in re.findall(r"\d{1,9}", ranks)]
        if name and isinstance(name, str) and isinstance(ranks, list) and ranks:
            numbers = {_number(rank, -1) for rank in ranks[:_MOST_RANKS]} - {-1}
            found[_text(name, "?")] = tuple(sorted(numbers))
    return found


def _status(raw: Any) -> dict[str, GroupStatus]:
    found = {}
    for name, status in raw.items() if isinstance(raw, Mapping) else ():
        if isinstance(status, Mapping):
            last = [status.get(f"last_{what}_collective") for what in ("enqueued", "started", "completed")]
            found[_text(name, "?")] = GroupStatus(*(_number(each, -1) for each in last))
    return found


def _sizes(raw: Any) -> tuple[tuple[int, ...], ...]:
    if not isinstance(raw, (list, tuple)):
        return ()
    return tuple(
        tuple(_number(size, 0) for size in shape[:_MOST_DIMENSIONS])
        for shape in raw[:_MOST_TENSORS]
        if isinstance(shape, (list, tuple))
    )


def _texts(raw: Any) -> tuple[str, ...]:
    if not isinstance(raw, (list, tuple)):
        return ()
    return tuple(_text(each, "?") for each in raw[:_MOST_TENSORS])


def _text(raw: Any, otherwise: str) -> str:
    if isinstance(raw, bool) or not isinstance(raw, (str, int)):
        return otherwise
    if isinstance(raw, int) and abs(raw) > LARGEST_INTEGER:
        return otherwise
    return one_line(raw, _LONGEST_NAME)


def _number(raw: Any, otherwise: int) -> int:
    if isinstance(raw, bool) or not isinstance(raw, int) or not -1 <= raw <= LARGEST_INTEGER:
        return otherwise
    return raw
