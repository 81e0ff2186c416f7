"""What the dumps of a job say together, and which rank caused the hang.

Ranks wait for ranks: one that is missing in a group may itself wait in another. The culprit is a rank that
others wait for and that does not wait; where a call differs, the first of the ranks that go against most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdpbench.reports.flight_recorder.dump import Dump, Entry
from fsdpbench.reports.flight_recorder.matching import Group, Problem, groups_of, problems_of
from fsdpbench.reports.flight_recorder.reading import read_dump

_MOST_SHOWN = 16


@dataclass(frozen=True)
class Verdict:
    """`missing_dumps`: ranks of the job that left none. `problems`: at most one a group, the earliest first;
    `culprit`: the one to look at, in a sentence."""

    dumps: tuple[Dump, ...]
    missing_dumps: tuple[int, ...]
    groups: tuple[Group, ...]
    problems: tuple[Problem, ...]
    culprit: str

    def to_dict(self) -> dict[str, Any]:
        """As `fsdpbench analyze --json` prints it."""
        return {
            "schema": 1,
            "flight_recorder": {
                "ranks": [_of_dump(dump) for dump in self.dumps],
                "missing_dumps": list(self.missing_dumps),
                "groups": [_of_group(group) for group in self.groups],
                "problems": [_of_problem(problem) for problem in self.problems],
                "culprit": self.culprit,
            },
        }


def judge(paths: Mapping[int, Path]) -> Verdict:
    """Read the dumps, by rank, and find what their ranks do not agree on. Raises `TraceError`."""
    dumps = tuple(read_dump(path, rank) for rank, path in paths.items())
    groups = tuple(groups_of(dumps))
    problems = tuple(problems_of(dumps))
    missing = _missing_dumps(dumps, groups)
    return Verdict(dumps, missing, groups, problems, _culprit(problems, missing))


def _missing_dumps(dumps: Sequence[Dump], groups: Sequence[Group]) -> tuple[int, ...]:
    """Ranks that some dump knows of, or that are between others, and that left none."""
    there = {dump.rank for dump in dumps}
    named = {rank for group in groups if group.said for rank in group.members}
    named |= {rank for dump in dumps for ranks in dump.members.values() for rank in ranks}
    if not named and len(there) <= max(there, default=0) < _MOST_SHOWN * len(there):
        named = set(range(max(there)))
    return tuple(sorted(named - there))


def _culprit(problems: Sequence[Problem], missing_dumps: Sequence[int]) -> str:
    if not problems:
        if missing_dumps:
            return f"unknown: the ranks that left dumps agree, and {ranks_text(missing_dumps)} left none"
        return "none: every rank called the same collectives, and none is left waiting"
    differing = [each for each in problems if each.kind in ("kind", "sizes", "dtype")]
    if differing:
        return sentence(differing[0])
    waiting = {rank for each in problems if each.kind == "missing" for rank in each.others}
    for problem in problems:
        free = tuple(rank for rank in problem.ranks if rank not in waiting)
        if problem.kind == "missing" and free:
            return sentence(problem, free)
    return sentence(problems[0])


def sentence(problem: Problem, ranks: Sequence[int] | None = None) -> str:
    """A problem in one sentence; of a missing call, of these of its ranks."""
    blamed = tuple(ranks or problem.ranks)
    first = next(iter(problem.others), next(iter(problem.calls)))
    usual = calls_text(problem.calls[first])
    what = f"collective {problem.sequence} of group {group_text(problem.group)}"
    if problem.kind == "missing":
        waiting = f"where {ranks_text(problem.others)} {'waits' if len(problem.others) == 1 else 'wait'}"
        return f"{ranks_text(blamed)} never joined {usual}, {what}, {waiting}{_last_text(problem, blamed[0])}"
    if problem.kind == "unfinished":
        return _unfinished_text(problem, usual, what)
    mine = calls_text(problem.calls[blamed[0]])
    return f"{ranks_text(blamed)} called {mine} where {ranks_text((first,))} called {usual}, {what}"


def _last_text(problem: Problem, rank: int) -> str:
    last = problem.last.get(rank)
    if last is None:
        return ""
    return f"; its last there was {calls_text((last,))} (collective {last.sequence})"


def _unfinished_text(problem: Problem, usual: str, what: str) -> str:
    ranks = problem.ranks
    if problem.absent:
        waiting = tuple(sorted({*ranks, *problem.others}))
        return (
            f"{usual}, {what}, is not done on {ranks_text(waiting)}; "
            f"whether {ranks_text(problem.absent)} joined it is not known: no dump"
        )
    if problem.others and problem.calls[ranks[0]][0].state == "scheduled":
        have = "has" if len(ranks) == 1 else "have"
        return (
            f"{ranks_text(ranks)} {have} not started {usual}, {what}, as others have: "
            "the stream is still busy with what came before, or the GPU hangs in it"
        )
    if problem.others:
        return f"{usual}, {what}, is not done on {ranks_text(ranks)} alone: look at the GPU and its links"
    return f"all ranks joined {usual}, {what}, and it is not done: look at the network and the GPUs"


def calls_text(entries: Sequence[Entry]) -> str:
    """`all_reduce(4 x 1024 Float) at train.py:31`; parts of a coalesced call one after the other."""
    shown = [_call_text(entry) for entry in entries[:_MOST_SHOWN]]
    place = next((frame for entry in entries for frame in entry.own_frames), None)
    where = "" if place is None else f" at {Path(place.file).name}:{place.line}"
    return " + ".join(shown) + (" + ..." if len(entries) > _MOST_SHOWN else "") + where


def _call_text(entry: Entry) -> str:
    shapes = entry.input_sizes or entry.output_sizes
    told = [" x ".join(map(str, shape)) or "1" for shape in shapes[:_MOST_SHOWN]]
    if len(shapes) > _MOST_SHOWN:
        told.append(f"... {len(shapes):,} tensors")
    dtypes = sorted({*(entry.input_dtypes or entry.output_dtypes)})
    return f"{entry.kind}({' '.join(filter(None, (', '.join(told), ' and '.join(dtypes))))})"


def group_text(group: Group) -> str:
    """What the group is called."""
    name = group.name
    if name.description and name.description != "undefined":
        return name.description
    return f"{name.name} (ranks {', '.join(map(str, group.members[:_MOST_SHOWN]))})"


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0, 2, 5`."""
    shown = ", ".join(map(str, ranks[:_MOST_SHOWN]))
    rest = f" and {len(ranks) - _MOST_SHOWN:,} more" if len(ranks) > _MOST_SHOWN else ""
    return f"rank{'s' * (len(ranks) != 1)} {shown}{rest}"


def _of_dump(dump: Dump) -> dict[str, Any]:
    collectives = [entry for entry in dump.entries if not entry.is_p2p]
    last = dump.entries[-1] if dump.entries else None
    return {
        "rank": dump.rank,
        "path": str(dump.path),
        "version": dump.version,
        "entries": len(dump.entries),
        "point_to_point": len(dump.entries) - len(collectives),
        "states": dict(Counter(entry.state for entry in collectives)),
        "status": {name: vars(status) for name, status in dump.status.items()},
        "last": None if last is None else _of_entry(last),
    }


def _of_group(group: Group) -> dict[str, Any]:
    return {
        "name": group.name.name,
        "description": group.name.description,
        "ranks": list(group.members),
        "all_known": group.said,
    }


def _of_problem(problem: Problem) -> dict[str, Any]:
    return {
        "kind": problem.kind,
        "message": sentence(problem),
        "group": group_text(problem.group),
        "sequence": problem.sequence,
        "ranks": list(problem.ranks),
        "others": list(problem.others),
        "calls": {str(rank): [_of_entry(each) for each in calls] for rank, calls in problem.calls.items()},
        "last": {str(rank): _of_entry(entry) for rank, entry in problem.last.items()},
    }


def _of_entry(entry: Entry) -> dict[str, Any]:
    return {
        "kind": entry.kind,
        "group": entry.group.description or entry.group.name,
        "sequence": entry.sequence,
        "input_sizes": [list(shape) for shape in entry.input_sizes],
        "output_sizes": [list(shape) for shape in entry.output_sizes],
        "input_dtypes": list(entry.input_dtypes),
        "output_dtypes": list(entry.output_dtypes),
        "state": entry.state if entry.knows_states else "not recorded",
        "frames": [frame._asdict() for frame in entry.own_frames],
    }
