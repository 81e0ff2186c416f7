"""The rank that caused a hang, found in a job's Flight Recorder dumps or its watchdog's time-outs.

Ranks wait for each other: a rank that is missing in one group may itself wait in another. The culprit is a
rank that others wait for and that does not wait. If calls differ, it is the first rank that differs from
most."""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fsdpbench.base.errors import error_text
from fsdpbench.base.files.documents import rendered_beside
from fsdpbench.reports.readers.flight_recorder import Dump, Entry, GroupName, read_dump, read_logs

_Calls = tuple[Entry, ...]


@dataclass(frozen=True)
class Group:
    """A process group of the job. `members`: the known ones; `said`: whether the dumps name all of them."""

    name: GroupName
    members: tuple[int, ...]
    said: bool


@dataclass(frozen=True)
class Problem:
    """The first collective of a group on which its ranks disagree.

    kind: `missing`, `kind`, `sizes`, `dtype`, or `unfinished` (all joined, but it is not done).
    ranks: ranks that are missing, differ, or have not started.  others: ranks that wait for them.
    absent: members of the group without a dump.
    calls: the calls of each rank, by rank.  last: the last earlier call of missing ranks in this group.
    parted: an earlier call that waiting ranks made from another line than missing ranks.
    """

    kind: str
    group: Group
    sequence: int
    ranks: tuple[int, ...]
    others: tuple[int, ...]
    calls: Mapping[int, _Calls]
    last: Mapping[int, Entry]
    absent: tuple[int, ...] = ()
    parted: "Parted | None" = None

    @property
    def created_ns(self) -> int:
        return min((entry.created_ns for calls in self.calls.values() for entry in calls), default=0)


@dataclass(frozen=True)
class Parted:
    """An earlier collective that ranks called from two lines: `ahead` on ranks that wait, `behind` on ranks
    that are missing. `is_extra`: shifted by one call, the lines match again, up to the end."""

    sequence: int
    ahead: str
    behind: str
    is_extra: bool


def groups_of(dumps: Sequence[Dump]) -> list[Group]:
    """Return the groups that the dumps name. If no dump lists the members of a group, its callers are the
    members; the default group has all ranks."""
    ranks: dict[tuple[GroupName, tuple[int, ...]], set[int]] = {}
    for dump in dumps:
        for name in dict.fromkeys(entry.group for entry in dump.entries):
            ranks.setdefault((name, dump.members.get(name.name, ())), set()).add(dump.rank)
    for dump in dumps:
        for (name, members), callers in ranks.items():
            callers |= {dump.rank} if name.name in dump.status and not members else set()
    everyone = {dump.rank for dump in dumps} | set(_gaps(dumps))
    return [
        Group(name, tuple(sorted(members or (everyone if name.is_default else callers))), bool(members))
        for (name, members), callers in ranks.items()
    ]


def first_problem(group: Group, dumps: Sequence[Dump]) -> Problem | None:
    """Return the first collective on which ranks of `group` disagree, or that is not done; else None."""
    inside = [dump for dump in dumps if dump.rank in group.members]
    histories = {dump.rank: _History(dump, group) for dump in inside}
    absent = tuple(rank for rank in group.members if rank not in histories)
    called = {
        sequence: {rank: each.calls[sequence] for rank, each in histories.items() if sequence in each.calls}
        for sequence in sorted({number for each in histories.values() for number in each.calls})
    }
    found = (_at(group, sequence, calls, histories) for sequence, calls in called.items())
    problem = next((each for each in found if each is not None), None) or _unfinished(group, called)
    return None if problem is None else replace(problem, absent=absent)


class _History:
    """The calls of one rank in a group, by sequence number."""

    def __init__(self, dump: Dump, group: Group) -> None:
        calls: dict[int, list[Entry]] = {}
        batch = False
        for entry in (each for each in dump.entries if each.group == group.name):
            closes = batch and entry.kind == "coalesced"  # older torch gives it the number of a collective
            batch = entry.is_p2p or closes
            if not batch:
                calls.setdefault(entry.sequence, []).append(entry)
        self.calls: dict[int, _Calls] = {number: tuple(each) for number, each in calls.items()}
        self.is_cut = dump.is_cut
        status = dump.status.get(group.name.name)
        self.last = max(max(self.calls, default=0), status.enqueued if status else 0)


def _at(
    group: Group, sequence: int, calls: Mapping[int, _Calls], histories: Mapping[int, _History]
) -> Problem | None:
    differing = _differing(calls)
    if differing is not None:
        kind, ranks = differing
        return Problem(kind, group, sequence, ranks, _without(calls, ranks), calls, {})
    # A rank without a recorded call in this group surely made none only if its buffer dropped no entry.
    behind = {rank: each for rank, each in histories.items() if each.last < sequence}
    missing = tuple(rank for rank, each in behind.items() if each.last or not each.is_cut)
    waiting = _waiting(calls)
    if not missing or not waiting:
        return None
    called = {rank: histories[rank].calls for rank in missing}
    last = {rank: each[max(each)][-1] for rank, each in called.items() if each}
    parted = _parted(sequence, waiting, missing, histories)
    return Problem("missing", group, sequence, missing, waiting, calls, last, parted=parted)


def _parted(
    sequence: int, waiting: Sequence[int], missing: Sequence[int], histories: Mapping[int, _History]
) -> "Parted | None":
    """Return the first collective before `sequence` that both sides called from different lines. A pair of
    lines that occurs more than once is taken for two branches of the program and skipped."""
    ahead, behind = (_lines_of(ranks, histories) for ranks in (waiting, missing))
    pairs = {each: (ahead[each], behind[each]) for each in sorted(ahead.keys() & behind.keys())}
    counts = Counter(pairs.values())
    for number, (one, other) in pairs.items():
        if number < sequence and one != other and counts[one, other] == 1:
            later = range(number, sequence)
            is_extra = all(ahead.get(each + 1) == behind.get(each) for each in later)
            return Parted(number, one, other, is_extra)
    return None


def _lines_of(ranks: Sequence[int], histories: Mapping[int, _History]) -> dict[int, str]:
    """Return the line from which all of `ranks` made each call; calls from different lines are left out."""
    found: dict[int, set[str]] = {}
    for rank in ranks:
        for number, entries in histories[rank].calls.items():
            found.setdefault(number, set()).add(_line_of(entries))
    return {number: line for number, (line, *others) in found.items() if line and not others}


def _waiting(calls: Mapping[int, _Calls]) -> tuple[int, ...]:
    """Return the ranks on which a collective is not done, as far as their backend records states."""
    return tuple(
        rank
        for rank, entries in calls.items()
        if any(entry.state != "completed" or not entry.knows_states for entry in _deciding(entries))
    )


def _deciding(entries: _Calls) -> _Calls:
    """Return the calls whose states count. Inside a coalesced call torch records no events, so those calls
    stay scheduled; the call that closes it has the state."""
    return entries[-1:] if entries[-1].kind == "coalesced" else entries


def _differing(calls: Mapping[int, _Calls]) -> tuple[str, tuple[int, ...]] | None:
    """Return which part of a call differs, and the ranks that differ from most ranks."""
    for name, part in (("kind", _kinds), ("sizes", _numbers), ("dtype", _dtypes)):
        said = {rank: value for rank, entries in calls.items() if (value := part(entries)) is not None}
        counts = Counter(said.values())
        if len(counts) > 1:
            usual = max(said, key=lambda rank: (counts[said[rank]], -rank))
            return name, tuple(sorted(rank for rank in said if said[rank] != said[usual]))
    return None


def _kinds(entries: _Calls) -> tuple[str, ...]:
    return tuple(entry.kind for entry in entries)


def _numbers(entries: _Calls) -> tuple[int, ...] | None:
    """Return the numbers of elements that must be equal on all ranks; None if ranks may differ."""
    numbers = [_number(entry) for entry in entries]
    return tuple(each for each in numbers if each is not None) if None not in numbers else None


def _number(entry: Entry) -> int | None:
    kind = entry.kind.lower().replace("_", "")
    if "alltoall" in kind:
        return None
    # For other kinds one side is the same on all ranks: shards may be uneven, and only one rank has the list
    # that a scatter distributes or a gather collects.
    whole_is_output = "allgather" in kind or kind == "scatter"
    shapes = entry.output_sizes if whole_is_output else entry.input_sizes
    return sum(math.prod(shape) for shape in shapes) if shapes else None


def _dtypes(entries: _Calls) -> tuple[str, ...] | None:
    """Return the calls' dtypes; None if a rank has none: the receivers of a scatter have no input."""
    dtypes = {dtype for entry in entries for dtype in (*entry.input_dtypes, *entry.output_dtypes)}
    return tuple(sorted(dtypes)) or None


def _unfinished(group: Group, called: Mapping[int, Mapping[int, _Calls]]) -> Problem | None:
    """Return the first collective that all ranks joined but that is not done on some of them."""
    for sequence, calls in called.items():
        entries = [entry for each in calls.values() for entry in each]
        if not all(entry.knows_states for entry in entries):
            continue
        waiting = _waiting(calls)
        if waiting:
            late = tuple(r for r in waiting if any(each.state == "scheduled" for each in _deciding(calls[r])))
            ranks = late if 0 < len(late) < len(waiting) else waiting
            return Problem("unfinished", group, sequence, ranks, _without(calls, ranks), calls, {})
    return None


def _without(calls: Mapping[int, _Calls], ranks: Sequence[int]) -> tuple[int, ...]:
    return tuple(rank for rank in calls if rank not in ranks)


def problems_of(dumps: Sequence[Dump]) -> Iterator[Problem]:
    """Yield the first problem of each group, the earliest first."""
    found = [first_problem(group, dumps) for group in groups_of(dumps)]
    yield from sorted((each for each in found if each is not None), key=lambda each: each.created_ns)


_MOST_SHOWN = 16


@dataclass(frozen=True)
class Verdict:
    """The verdict on a job's dumps. `missing_dumps`: ranks of the job without a dump. `problems`: at most one
    per group, the earliest first; `culprit`: the likely cause, in a sentence. `source`: the kind of input."""

    dumps: tuple[Dump, ...]
    missing_dumps: tuple[int, ...]
    groups: tuple[Group, ...]
    problems: tuple[Problem, ...]
    culprit: str
    source: str = "Flight Recorder dumps"

    def to_dict(self) -> dict[str, object]:
        """Return the verdict as `fsdpbench analyze --json` prints it."""
        return {
            "schema": 1,
            "flight_recorder": {
                "ranks": [_of_dump(dump) for dump in self.dumps],
                "missing_dumps": list(self.missing_dumps),
                "groups": [
                    {**group.name._asdict(), "ranks": list(group.members), "all_known": group.said}
                    for group in self.groups
                ],
                "problems": [_of_problem(problem) for problem in self.problems],
                "culprit": self.culprit,
                "source": self.source,
            },
        }


def judge(paths: Mapping[int, Path]) -> Verdict:
    """Read the dumps, by rank, and find where their ranks disagree. Raises `TraceError`."""
    return _judged(tuple(read_dump(path, rank) for rank, path in paths.items()))


def judge_logs(paths: Sequence[Path]) -> Verdict:
    """Read the time-outs in a job's logs and judge them the same way. Raises `TraceError`."""
    return replace(_judged(read_logs(paths)), source="time-outs of NCCL's watchdog")


def _judged(dumps: tuple[Dump, ...]) -> Verdict:
    groups = tuple(groups_of(dumps))
    problems = tuple(problems_of(dumps))
    missing = _missing_dumps(dumps, groups)
    return Verdict(dumps, missing, groups, problems, _culprit(problems, missing))


def _missing_dumps(dumps: Sequence[Dump], groups: Sequence[Group]) -> tuple[int, ...]:
    """Return the ranks without a dump that a dump names, or that are between ranks with dumps."""
    there = {dump.rank for dump in dumps}
    named = {rank for group in groups if group.said for rank in group.members}
    named |= {rank for dump in dumps for ranks in dump.members.values() for rank in ranks}
    return tuple(sorted(named - there)) if named else _gaps(dumps)


def _gaps(dumps: Sequence[Dump]) -> tuple[int, ...]:
    """Return the ranks below the last one that have no dump; none if most have no dump."""
    there = {dump.rank for dump in dumps}
    last = max(there, default=0)
    return tuple(sorted(set(range(last)) - there)) if last < _MOST_SHOWN * len(there) else ()


def _culprit(problems: Sequence[Problem], missing_dumps: Sequence[int]) -> str:
    if not problems:
        if missing_dumps:
            return f"unknown: the ranks that left dumps agree, and {ranks_text(missing_dumps)} left none"
        return "none: every rank called the same collectives, and none is left waiting"
    differing = [each for each in problems if each.kind in ("kind", "sizes", "dtype")]
    if differing:
        return sentence(differing[0])
    for one, other in itertools.combinations([each for each in problems if each.kind == "unfinished"], 2):
        first, second = {*one.ranks} & {*other.others}, {*other.ranks} & {*one.others}
        if first and second:
            return _cycle_text(one, other, sorted(second), sorted(first))
    waiting = {rank for each in problems if each.kind == "missing" for rank in each.others}
    for problem in problems:
        free = tuple(rank for rank in problem.ranks if rank not in waiting)
        if problem.kind == "missing" and free:
            return _parted_text(problem, free) if problem.parted else sentence(problem, free)
    return sentence(problems[0])


def _cycle_text(one: Problem, other: Problem, first: Sequence[int], second: Sequence[int]) -> str:
    """Return a text: which ranks began with which of two collectives that wait for each other."""
    (a, b) = (
        f"{calls_text(problem.calls[ranks[0]])} of group {group_text(problem.group)}"
        for problem, ranks in ((one, first), (other, second))
    )
    return f"two groups in opposite order: {ranks_text(first)} began with {a}, {ranks_text(second)} with {b}"


def _parted_text(problem: Problem, missing: Sequence[int]) -> str:
    """Return what the differing lines of an earlier call say about ranks that are missing later."""
    parted = problem.parted
    assert parted is not None
    call = f"collective {parted.sequence} of group {group_text(problem.group)}"
    lines = f"{parted.ahead}, that of {ranks_text(missing)} from {parted.behind}"
    if parted.is_extra:
        one = len(problem.others) == 1
        whose, are = ("its", "is") if one else ("their", "are")
        return f"{ranks_text(problem.others)} {are} off by one: {whose} {call} comes from {lines}"
    parts = f"{call} of {ranks_text(problem.others)} comes from {lines}"
    return f"cannot tell: either {sentence(problem, missing)}; or they parted before: {parts}"


def sentence(problem: Problem, ranks: Sequence[int] | None = None) -> str:
    """Return a problem in one sentence; for a missing call, about `ranks` if given."""
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
        return error_text(
            "flight_recorder.waiting", usual, what, ranks_text(waiting), ranks_text(problem.absent)
        )
    if problem.others and problem.calls[ranks[0]][0].state == "scheduled":
        have = "has" if len(ranks) == 1 else "have"
        return error_text("flight_recorder.not_started", ranks_text(ranks), have, usual, what)
    if problem.others:
        return f"{usual}, {what}, is not done on {ranks_text(ranks)} alone: look at the GPU and its links"
    all_ranks = "all ranks" if problem.group.said else f"{ranks_text(tuple(problem.calls))}, all known ones,"
    return f"{all_ranks} joined {usual}, {what}, and it is not done: look at the network and the GPUs"


def calls_text(entries: Sequence[Entry]) -> str:
    """Return `all_reduce(4 x 1024 Float) at train.py:31`; parts of a coalesced call are joined by `+`."""
    shown = [_call_text(entry) for entry in entries[:_MOST_SHOWN]]
    line = _line_of(entries)
    where = f" at {line}" if line else ""
    return " + ".join(shown) + (" + ..." if len(entries) > _MOST_SHOWN else "") + where


def _line_of(entries: Sequence[Entry]) -> str:
    """Return the innermost line of the program that made a call, such as `train.py:31`."""
    place = next((frame for entry in entries for frame in entry.own_frames), None)
    return "" if place is None else f"{Path(place.file).name}:{place.line}"


def _call_text(entry: Entry) -> str:
    shapes = entry.input_sizes or entry.output_sizes
    sizes = [" x ".join(map(str, shape)) or "1" for shape in shapes[:_MOST_SHOWN]]
    if len(shapes) > _MOST_SHOWN:
        sizes.append(f"... {len(shapes):,} tensors")
    dtypes = sorted({*(entry.input_dtypes or entry.output_dtypes)})
    return f"{entry.kind}({' '.join(filter(None, (', '.join(sizes), ' and '.join(dtypes))))})"


def group_text(group: Group) -> str:
    """Return the group's description, or its name and ranks if it has none."""
    name = group.name
    if name.description and name.description != "undefined":
        return name.description
    return f"{name.name} (ranks {', '.join(map(str, group.members[:_MOST_SHOWN]))})"


def ranks_text(ranks: Sequence[int]) -> str:
    """Return `rank 3`, `ranks 0, 2, 5`."""
    shown = ", ".join(map(str, ranks[:_MOST_SHOWN]))
    rest = f" and {len(ranks) - _MOST_SHOWN:,} more" if len(ranks) > _MOST_SHOWN else ""
    return f"rank{'s' * (len(ranks) != 1)} {shown}{rest}"


def _of_dump(dump: Dump) -> dict[str, object]:
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


def _of_problem(problem: Problem) -> dict[str, object]:
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


def _of_entry(entry: Entry) -> dict[str, object]:
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


def describe(verdict: Verdict) -> str:
    """Return the verdict for a terminal (`flight_recorder.jinja`): the culprit, the problems, and each rank's
    last call."""
    versions = dict.fromkeys(dump.version for dump in verdict.dumps if dump.version)
    words = {"sentence": sentence, "ranks_text": ranks_text, "group_text": group_text, "last": _last}
    text = rendered_beside(__file__, "flight_recorder.jinja", verdict=verdict, versions=versions, **words)
    return text.rstrip("\n")


def _last(dump: Dump) -> str:
    if not dump.entries:
        return "no call recorded"
    entry = dump.entries[-1]
    collectives = [each for each in dump.entries if not each.is_p2p]
    number = "" if entry.is_p2p else f", collective {entry.sequence} of group {entry.group.description}"
    if not all(each.knows_states for each in collectives):
        counts = f"{len(collectives):,} collectives; gloo records no states"
    else:
        states = Counter(each.state for each in collectives)
        counts = ", ".join(f"{count:,} {state}" for state, count in sorted(states.items()))
    return f"{calls_text((entry,))}{number} ({counts})"
