"""Time-outs that the watchdog of NCCL's process groups writes into a job's logs.

Without Flight Recorder dumps a hang leaves these lines alone, of torch 1.13 and later in several forms:

    [rank3]:[E...] [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=31, OpType=...
    [rank2]:[E...] [PG ID 0 PG GUID 0(default_pg) Rank 2] ... Last enqueued NCCL work: 30, last completed...

They name one call of a rank, the first that ran too long, and how many it enqueued and completed: a dump of
that call, so that one judgement serves both.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fsdpbench.base.reading import one_line, read_tail
from fsdpbench.reports.readers import TraceError, flight_recorder

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


@dataclass
class _Seen:
    """Lines of one rank about one group: its first call that ran too long, calls enqueued and completed."""

    timed_out: flight_recorder.Entry | None = None
    enqueued: int = -1
    completed: int = -1
    frames: list[flight_recorder.Frame] = field(default_factory=list)


def find_logs(paths: Sequence[Path]) -> list[Path]:
    """Return the paths, if all are logs with a time-out of the watchdog; none if none is.

    Raises:
        TraceError: logs beside other files.
    """
    logs = [path for path in paths if _is_text(path) and _SIGN in read_tail(path, _MOST_BYTES)]
    others = [path for path in paths if path not in logs and not (logs and _is_text(path))]
    if logs and others:
        raise TraceError(others[0], "is not a log like the others: analyze it separately")
    return [path for path in paths if path.is_file()] if logs else []


def read_logs(paths: Sequence[Path]) -> tuple[flight_recorder.Dump, ...]:
    """Return what each rank said, by rank.

    Raises:
        TraceError: a line that names no rank of the job, only one of a group.
    """
    seen: dict[int, dict[str, _Seen]] = {}
    descriptions: dict[str, str] = {"0": flight_recorder.DEFAULT_GROUP}
    for path in paths:
        _read(path, seen, descriptions)
    return tuple(_dump(paths[0], rank, groups, seen, descriptions) for rank, groups in sorted(seen.items()))


def _read(path: Path, seen: dict[int, dict[str, _Seen]], descriptions: dict[str, str]) -> None:
    current: _Seen | None = None
    for whole in read_tail(path, _MOST_BYTES).splitlines():
        line = whole[:_LONGEST_LINE]
        caller = _CALLER.search(line)
        if caller is None:
            frame = _FRAME.search(line)
            if frame is not None and current is not None:
                current.frames.append(
                    flight_recorder.Frame(one_line(frame[2], 300), int(frame[3]), one_line(frame[1], 300))
                )
            continue
        timeout, status = _TIMEOUT.search(line), _STATUS.search(line)
        if timeout is None and status is None:
            continue
        group = caller[1] or "0"
        if caller[2]:
            descriptions[group] = one_line(caller[2], 300)
        current = seen.setdefault(_rank(path, line, caller), {}).setdefault(group, _Seen())
        if timeout is not None and current.timed_out is None:
            current.timed_out = _entry(timeout)
        if status is not None:
            current.enqueued = max(current.enqueued, int(status[1]))
            current.completed = max(current.completed, int(status[2]))


def _rank(path: Path, line: str, caller: re.Match[str]) -> int:
    """Return the rank in the job, by the line's prefix, the default group's number, or the file's name."""
    prefix, of_file = _GLOBAL_RANK.search(line), _OF_FILE.search(path.resolve().as_posix())
    if prefix is not None:
        return int(prefix[1])
    if caller[1] in (None, "0"):
        return int(caller[3])
    if of_file is not None:
        return int(of_file[1])
    raise TraceError(
        path,
        f"says rank {caller[3]} of group {caller[1]}, and not which rank of the job that is: "
        "keep the prefix [rank3]: of torchrun, or give one log a rank with the rank in its name",
    )


def _entry(found: re.Match[str]) -> flight_recorder.Entry:
    shape = tuple(int(size) for size in re.findall(r"\d{1,18}", found[3] or ""))
    inputs, outputs = ((int(found[4]),), (int(found[5]),)) if found[4] else (shape, shape)
    return flight_recorder.Entry(
        group=flight_recorder.GroupName("", ""),
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
) -> flight_recorder.Dump:
    entries, status = [], {}
    for group, own in groups.items():
        name = flight_recorder.GroupName(group, descriptions.get(group, ""))
        if own.timed_out is not None:
            entries.append(replace(own.timed_out, group=name, frames=tuple(own.frames)))
        else:
            # It completed calls that ran too long elsewhere: as far as is known, the same ones.
            others = (each[group].timed_out for each in seen.values() if group in each)
            late = {each.sequence: each for each in others if each and each.sequence <= own.completed}
            entries += [replace(each, group=name, state="completed") for each in late.values()]
        last = own.timed_out.sequence if own.timed_out else -1
        if max(own.enqueued, last) >= 0:
            status[group] = flight_recorder.GroupStatus(max(own.enqueued, last), -1, own.completed)
    return flight_recorder.Dump(path, rank, "", tuple(entries), status=status)


def _is_text(path: Path) -> bool:
    """Return whether a file may be a log, and is neither a trace nor a dump."""
    head = flight_recorder.head_of(path)
    return head is not None and b"\0" not in head and head[:1] not in (b"{", b"\x80", b"\x1f")
