"""The same collective on all ranks of a group: who is missing, whose call differs.

    group default_pg     4            5            6
        rank 0           all_gather   all_reduce   all_reduce (scheduled)
        rank 1           all_gather   all_reduce                            never joined 6
        rank 2           ...          all_reduce   all_reduce (scheduled)   4 has left the recorder's buffer

Calls are matched by the group's sequence number, which counts on every rank. Point-to-point calls have none
of their own and are not compared.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fsdpbench.reports.flight_recorder.dump import Dump, Entry, GroupName

_Calls = tuple[Entry, ...]


@dataclass(frozen=True)
class Group:
    """A process group of the job. `members` that are known; `said`: the dumps name all of them."""

    name: GroupName
    members: tuple[int, ...]
    said: bool


@dataclass(frozen=True)
class Problem:
    """The first collective of a group that its ranks do not agree on.

    kind: `missing`, `kind`, `sizes`, `dtype`, or `unfinished` (all joined, and it is not done).
    ranks: those that are missing, differ, or have not started.  others: those that wait for them.
    absent: members of the group that left no dump.
    calls: what each rank called, by rank.  last: what missing ranks called in this group before.
    """

    kind: str
    group: Group
    sequence: int
    ranks: tuple[int, ...]
    others: tuple[int, ...]
    calls: Mapping[int, _Calls]
    last: Mapping[int, Entry]
    absent: tuple[int, ...] = ()

    @property
    def created_ns(self) -> int:
        return min((entry.created_ns for calls in self.calls.values() for entry in calls), default=0)


def groups_of(dumps: Sequence[Dump]) -> list[Group]:
    """The groups that the dumps name. Where none says who is in a group, those that call it are; of the
    default group, all."""
    ranks: dict[tuple[GroupName, tuple[int, ...]], set[int]] = {}
    for dump in dumps:
        for name in dict.fromkeys(entry.group for entry in dump.entries):
            ranks.setdefault((name, dump.members.get(name.name, ())), set()).add(dump.rank)
    everyone = {dump.rank for dump in dumps}
    return [
        Group(name, tuple(sorted(members or (everyone if name.is_default else callers))), bool(members))
        for (name, members), callers in ranks.items()
    ]


def first_problem(group: Group, dumps: Sequence[Dump]) -> Problem | None:
    """The first collective that the ranks of `group` do not agree on, or that is not done; None if there is
    none."""
    inside = [dump for dump in dumps if dump.rank in group.members]
    histories = {dump.rank: _History(dump, group) for dump in inside}
    absent = tuple(rank for rank in group.members if rank not in histories)
    sequences = sorted({number for each in histories.values() for number in each.calls})
    found = (_at(group, sequence, histories) for sequence in sequences)
    problem = next((each for each in found if each is not None), None) or _unfinished(group, histories)
    return None if problem is None else replace(problem, absent=absent)


class _History:
    """The calls of one rank in a group, by sequence number."""

    def __init__(self, dump: Dump, group: Group) -> None:
        calls: dict[int, list[Entry]] = {}
        for entry in dump.entries:
            if entry.group == group.name and not entry.is_p2p:
                calls.setdefault(entry.sequence, []).append(entry)
        self.calls: dict[int, _Calls] = {number: tuple(each) for number, each in calls.items()}
        self._is_cut = dump.is_cut
        status = dump.status.get(group.name.name)
        self.last = max(max(self.calls, default=0), status.enqueued if status else 0)

    def never_called(self, sequence: int) -> bool:
        """Whether this rank certainly has not called it: its last one came before. Of a rank that keeps no
        call of this group at all that is certain only where nothing has left its buffer."""
        return self.last < sequence and (bool(self.last) or not self._is_cut)


def _at(group: Group, sequence: int, histories: Mapping[int, _History]) -> Problem | None:
    calls = {rank: each.calls[sequence] for rank, each in histories.items() if sequence in each.calls}
    differing = _differing(calls)
    if differing is not None:
        kind, ranks = differing
        return Problem(kind, group, sequence, ranks, _without(calls, ranks), calls, {})
    missing = tuple(rank for rank, each in histories.items() if each.never_called(sequence))
    waiting = _waiting(calls)
    if not missing or not waiting:
        return None
    before = {rank: _last_entry(histories[rank]) for rank in missing}
    last = {rank: entry for rank, entry in before.items() if entry is not None}
    return Problem("missing", group, sequence, missing, waiting, calls, last)


def _last_entry(history: _History) -> Entry | None:
    return history.calls[max(history.calls)][-1] if history.calls else None


def _waiting(calls: Mapping[int, _Calls]) -> tuple[int, ...]:
    """The ranks on which a collective is not done, as far as their backend says."""
    return tuple(
        rank
        for rank, entries in calls.items()
        if any(entry.state != "completed" or not entry.knows_states for entry in entries)
    )


def _differing(calls: Mapping[int, _Calls]) -> tuple[str, tuple[int, ...]] | None:
    """Which part of a call differs, and the ranks that do not go with most of the others."""
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
    """Elements of what must be equal on all ranks; None where ranks may differ."""
    numbers = [_number(entry) for entry in entries]
    return tuple(each for each in numbers if each is not None) if None not in numbers else None


def _number(entry: Entry) -> int | None:
    kind = entry.kind.lower().replace("_", "")
    if "alltoall" in kind:
        return None
    # Of the others one side is the same on all ranks: shards may be uneven, and one rank alone has the list
    # that a scatter hands out or a gather collects.
    whole_is_output = "allgather" in kind or kind == "scatter"
    shapes = entry.output_sizes if whole_is_output else entry.input_sizes
    return sum(math.prod(shape) for shape in shapes) if shapes else None


def _dtypes(entries: _Calls) -> tuple[str, ...] | None:
    """None where a rank has none to say: the receivers of a scatter have no input."""
    dtypes = {dtype for entry in entries for dtype in (*entry.input_dtypes, *entry.output_dtypes)}
    return tuple(sorted(dtypes)) or None


def _unfinished(group: Group, histories: Mapping[int, _History]) -> Problem | None:
    """The first collective that all ranks joined and that is not done on some of them."""
    for sequence in sorted({number for each in histories.values() for number in each.calls}):
        calls = {rank: each.calls[sequence] for rank, each in histories.items() if sequence in each.calls}
        entries = [entry for each in calls.values() for entry in each]
        if not all(entry.knows_states for entry in entries):
            continue
        waiting = _waiting(calls)
        if waiting:
            late = tuple(r for r in waiting if any(each.state == "scheduled" for each in calls[r]))
            ranks = late if 0 < len(late) < len(waiting) else waiting
            return Problem("unfinished", group, sequence, ranks, _without(calls, ranks), calls, {})
    return None


def _without(calls: Mapping[int, _Calls], ranks: Sequence[int]) -> tuple[int, ...]:
    return tuple(rank for rank in calls if rank not in ranks)


def problems_of(dumps: Sequence[Dump]) -> Iterator[Problem]:
    """The first problem of each group, the earliest first."""
    found = [first_problem(group, dumps) for group in groups_of(dumps)]
    yield from sorted((each for each in found if each is not None), key=lambda each: each.created_ns)
