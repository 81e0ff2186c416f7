"""Dumps of PyTorch's Flight Recorder: which files are dumps, and one rank's dump as checked values.

With `TORCH_FR_BUFFER_SIZE=2000` and `TORCH_NCCL_DUMP_ON_TIMEOUT=1` every rank of a job that hangs writes a
file `nccl_trace_rank_3`: the last collectives that it called, with sizes, dtypes, states and Python frames.
The file is a pickle of plain values, or the same in JSON. Its content is not trusted: classes in a pickle are
refused, sizes are bounded, and a value of another type than torch writes counts as missing.

Without dumps, the job's logs contain time-out messages of the watchdog of NCCL's process groups, which torch
1.13 and later write in several forms:

    [rank3]:[E...] [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=31, OpType=...
    [rank2]:[E...] [PG ID 0 PG GUID 0(default_pg) Rank 2] ... Last enqueued NCCL work: 30, last completed...

They name one call of a rank, the first that timed out, and how many calls it enqueued and completed. They are
read as a dump with that call, so that one analysis handles both.
"""

import io
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from fsdpbench.base import reading
from fsdpbench.base.errors import error_text
from fsdpbench.reports.readers import TraceError

_INSTALLED = ("/site-packages/", "/dist-packages/", "/lib/python", "/torch/")
DEFAULT_GROUP = "default_pg"
_MOST_BYTES = 64 << 20
_LONGEST_LINE = 4096
_SIGN = "Watchdog caught collective operation timeout"
_GLOBAL_RANK = re.compile(r"\[rank(\d{1,7})\]:")
_OF_FILE = re.compile(r"(?:^|/)(?:rank_?)?(\d{1,7})(?:/std(?:err|out))?(?:\.(?:log|txt|err|out))?$")
_CALLER = re.compile(
    r"\[(?:PG (?:ID )?(\d{1,9}) ?(?:PG GUID \w{1,99})? ?(?:\(([^()]{0,300})\))? ?)?Rank (\d{1,7})\]"
)
_TIMEOUT = re.compile(
    rf"{_SIGN}: WorkNCCL\((?:SeqNum=(\d{{1,18}}), )?OpType=(\w{{1,60}})"
    r"(?:, TensorShape=\[([\d, ]{0,300})\])?(?:, NumelIn=(\d{1,18}), NumelOut=(\d{1,18}))?"
)
_STATUS = re.compile(
    r"[Ll]ast enqueued (?:NCCL )?work: (-?\d{1,18}), last completed (?:NCCL )?work: (-?\d{1,18})"
)
_FRAME = re.compile(r"#\d{1,4} (\S{1,300}) from (\S{1,1000}):(\d{1,9})\s*$")


class Frame(NamedTuple):
    """A Python frame of a call."""

    file: str
    line: int
    function: str

    @property
    def is_installed(self) -> bool:
        """Return whether it belongs to Python, torch or another library, not to the program itself."""
        return self.file.startswith("<") or any(folder in self.file for folder in _INSTALLED)

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


class GroupName(NamedTuple):
    """A rank's name and description of a process group."""

    name: str
    description: str

    @property
    def is_default(self) -> bool:
        return self.description == DEFAULT_GROUP


@dataclass(frozen=True)
class Entry:
    """One call. `sequence` counts the collectives of its group; parts of a coalesced call share it. Sizes are
    shapes. `created_ns`: since the epoch. `state`: `scheduled`, `started` or `completed`."""

    group: GroupName
    sequence: int
    backend: str
    kind: str
    input_sizes: tuple[tuple[int, ...], ...]
    output_sizes: tuple[tuple[int, ...], ...]
    input_dtypes: tuple[str, ...]
    output_dtypes: tuple[str, ...]
    state: str
    is_p2p: bool
    created_ns: int
    frames: tuple[Frame, ...] = ()

    @property
    def own_frames(self) -> tuple[Frame, ...]:
        """Return the frames, the program's own first, then installed code; innermost first in both."""
        own = [frame for frame in self.frames if not frame.is_installed]
        return (*own, *(frame for frame in self.frames if frame.is_installed))

    @property
    def knows_states(self) -> bool:
        """Return whether the backend records the states of its collectives: gloo does not."""
        return self.backend != "gloo"


@dataclass(frozen=True)
class GroupStatus:
    """Sequence numbers of a group's last collectives, -1 for none: called, running on the device, done."""

    enqueued: int
    started: int
    completed: int


@dataclass(frozen=True)
class Dump:
    """One rank's file. `members`: the global ranks of each group, if the dump lists them. `is_cut`: the
    recorder keeps only the last entries, and older ones are gone."""

    path: Path
    rank: int
    version: str
    entries: tuple[Entry, ...]
    members: dict[str, tuple[int, ...]] = field(default_factory=dict)
    status: dict[str, GroupStatus] = field(default_factory=dict)
    is_cut: bool = False


LARGEST_DUMP = 256 << 20
_MOST_ENTRIES = 1_000_000
_MOST_FRAMES = 64
_MOST_TENSORS = 10_000
_MOST_DIMENSIONS = 64
_LONGEST_NAME = 300
_MOST_RANKS = 1 << 20
_STATES = ("scheduled", "started", "completed")


def read_dump(path: Path, rank: int) -> Dump:
    """Return the dump of `rank`.

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
        data = reading.read_bytes(path, LARGEST_DUMP)
        if not data.startswith(b"\x80"):
            return reading.parse_json(data, str(path))
    except reading.UnreadableError as error:
        raise TraceError(path, error.reason) from None
    try:
        return reading.load_plain(io.BytesIO(data), len(data))
    except MemoryError:
        reason = "is not a Flight Recorder dump (it asks for more memory than its size explains)"
    except EOFError:
        reason = "is truncated: the pickle ends in the middle"
    except Exception as error:  # damaged pickles raise nearly anything
        text = "truncated" if "truncated" in str(error) else reading.one_line(error, 200)
        reason = f"is a damaged Flight Recorder dump ({text})"
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
    return tuple(
        Frame(_text(each.get("filename"), "?"), _number(each.get("line"), 0), _text(each.get("name"), "?"))
        for each in _listed(raw)[:_MOST_FRAMES]
        if isinstance(each, Mapping)
    )


def _members(raw: Any) -> dict[str, tuple[int, ...]]:
    """Return the ranks of groups by name. torch writes them as a text, `"[0, 1, 2]"`; groups of gloo without
    a name are left out."""
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
    return tuple(
        tuple(_number(size, 0) for size in shape[:_MOST_DIMENSIONS])
        for shape in _listed(raw)[:_MOST_TENSORS]
        if isinstance(shape, (list, tuple))
    )


def _texts(raw: Any) -> tuple[str, ...]:
    return tuple(_text(each, "?") for each in _listed(raw)[:_MOST_TENSORS])


def _listed(raw: Any) -> Sequence[Any]:
    """Return a list from the file; empty if the value is not a list."""
    return raw if isinstance(raw, (list, tuple)) else ()


def _text(raw: Any, otherwise: str) -> str:
    if isinstance(raw, bool) or not isinstance(raw, (str, int)):
        return otherwise
    if isinstance(raw, int) and abs(raw) > reading.LARGEST_INTEGER:
        return otherwise
    return reading.one_line(raw, _LONGEST_NAME)


def _number(raw: Any, otherwise: int) -> int:
    if isinstance(raw, bool) or not isinstance(raw, int) or not -1 <= raw <= reading.LARGEST_INTEGER:
        return otherwise
    return raw


_RANK = re.compile(r"(\d{1,9})(?:\.(?:json|pickle|pkl|bin|dump|dat))?$")
_HEAD = 1 << 16
_DEPTH = 2
_MOST_FILES = 100_000
_WORDS = (b"pg_config", b"pg_status", b"profiling_name", b"nccl_comm_state")
_OTHERS = (b"traceEvents", b"device_traces")


def find_dumps(paths: Sequence[Path]) -> dict[int, Path]:
    """Return the dumps among `paths` and in the folders among them, by rank; empty if there are none.

    Raises:
        TraceError: two dumps of one rank, a dump whose name has no rank, or dumps mixed with other files.
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
                raise TraceError(dump, error_text("flight_recorder.second_dump", rank, found[rank]))
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
            named = (Path(place, name) for name in sorted(names) if _RANK.search(name))
            yield from filter(_is_dump, named)
    except (OSError, ValueError):
        return  # the trace reader reports what is wrong with it


def head_of(path: Path) -> bytes | None:
    """Return the beginning of a file; None if it cannot be read."""
    try:
        if not path.is_file():
            return None
        with path.open("rb") as file:
            return file.read(_HEAD)
    except (OSError, ValueError):
        return None


def _is_dump(path: Path) -> bool:
    head = head_of(path) or b""
    if head[:1] != b"\x80" and not head[:2].lstrip().startswith(b"{"):
        return False
    return any(word in head for word in _WORDS) and not any(word in head for word in _OTHERS)


@dataclass
class _Seen:
    """Log lines of one rank about one group: its first call that timed out, calls enqueued and completed."""

    timed_out: Entry | None = None
    enqueued: int = -1
    completed: int = -1
    frames: list[Frame] = field(default_factory=list)


def find_logs(paths: Sequence[Path]) -> list[Path]:
    """Return the paths, if all are logs and one of them has a time-out of the watchdog; otherwise none.

    Raises:
        TraceError: logs mixed with other files.
    """
    logs = [path for path in paths if _is_text(path) and _SIGN in reading.read_tail(path, _MOST_BYTES)]
    others = [path for path in paths if path not in logs and not (logs and _is_text(path))]
    if logs and others:
        raise TraceError(others[0], "is not a log like the others: analyze it separately")
    return [path for path in paths if path.is_file()] if logs else []


def read_logs(paths: Sequence[Path]) -> tuple[Dump, ...]:
    """Return a dump of what each rank logged, by rank.

    Raises:
        TraceError: a line names only the rank in a group, not the rank in the job.
    """
    seen: dict[int, dict[str, _Seen]] = {}
    descriptions: dict[str, str] = {"0": DEFAULT_GROUP}
    for path in paths:
        _read(path, seen, descriptions)
    return tuple(_dump(paths[0], rank, groups, seen, descriptions) for rank, groups in sorted(seen.items()))


def _read(path: Path, seen: dict[int, dict[str, _Seen]], descriptions: dict[str, str]) -> None:
    current: _Seen | None = None
    for whole in reading.read_tail(path, _MOST_BYTES).splitlines():
        line = whole[:_LONGEST_LINE]
        caller = _CALLER.search(line)
        if caller is None:
            frame = _FRAME.search(line)
            if frame is not None and current is not None:
                name, file = (reading.one_line(frame[place], 300) for place in (2, 1))
                current.frames.append(Frame(name, int(frame[3]), file))
            continue
        timeout, status = _TIMEOUT.search(line), _STATUS.search(line)
        if timeout is None and status is None:
            continue
        group = caller[1] or "0"
        if caller[2]:
            descriptions[group] = reading.one_line(caller[2], 300)
        current = seen.setdefault(_rank_of_line(path, line, caller), {}).setdefault(group, _Seen())
        if timeout is not None and current.timed_out is None:
            current.timed_out = _entry_of_line(timeout)
        if status is not None:
            current.enqueued = max(current.enqueued, int(status[1]))
            current.completed = max(current.completed, int(status[2]))


def _rank_of_line(path: Path, line: str, caller: re.Match[str]) -> int:
    """Return the rank in the job, from the line's prefix, the default group's number, or the file's name."""
    prefix, of_file = _GLOBAL_RANK.search(line), _OF_FILE.search(path.resolve().as_posix())
    if prefix is not None:
        return int(prefix[1])
    if caller[1] in (None, "0"):
        return int(caller[3])
    if of_file is not None:
        return int(of_file[1])
    raise TraceError(path, error_text("flight_recorder.rank_of_job", caller[3], caller[1]))


def _entry_of_line(found: re.Match[str]) -> Entry:
    shape = tuple(int(size) for size in re.findall(r"\d{1,18}", found[3] or ""))
    inputs, outputs = ((int(found[4]),), (int(found[5]),)) if found[4] else (shape, shape)
    return Entry(
        group=GroupName("", ""),
        sequence=int(found[1] or 0),
        backend="nccl",
        kind=found[2].lower().strip("_"),
        input_sizes=(inputs,) if inputs else (),
        output_sizes=(outputs,) if outputs else (),
        input_dtypes=(),
        output_dtypes=(),
        state="started",
        is_p2p=found[2] in ("SEND", "RECV", "COALESCED"),
        created_ns=0,
    )


def _dump(
    path: Path,
    rank: int,
    groups: dict[str, _Seen],
    seen: dict[int, dict[str, _Seen]],
    descriptions: dict[str, str],
) -> Dump:
    entries, status = [], {}
    for group, own in groups.items():
        name = GroupName(group, descriptions.get(group, ""))
        if own.timed_out is not None:
            entries.append(replace(own.timed_out, group=name, frames=tuple(own.frames)))
        else:
            # This rank completed calls that timed out elsewhere: as far as is known, the same calls.
            others = (each[group].timed_out for each in seen.values() if group in each)
            late = {each.sequence: each for each in others if each and each.sequence <= own.completed}
            entries += [replace(each, group=name, state="completed") for each in late.values()]
        last = own.timed_out.sequence if own.timed_out else -1
        if max(own.enqueued, last) >= 0:
            status[group] = GroupStatus(max(own.enqueued, last), -1, own.completed)
    return Dump(path, rank, "", tuple(entries), status=status)


def _is_text(path: Path) -> bool:
    """Return whether a file may be a log: a text that is neither a trace nor a dump."""
    head = head_of(path)
    return head is not None and b"\0" not in head and head[:1] not in (b"{", b"\x80", b"\x1f")
