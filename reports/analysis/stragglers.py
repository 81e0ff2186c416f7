"""Waiting for slow ranks, separated from transfer time, from the traces of several ranks.

A collective runs on every rank of its communicator until the last one has joined and the data have arrived.
The last rank waits for no other, so its duration is the transfer alone; the excess of the others' durations
over it is waiting:

    rank 0   |== waiting ===|= transfer =|
    rank 1          |= w ===|= transfer =|
    rank 2                  |= transfer =|   <- the straggler

Only durations are compared, so the ranks' clocks need not agree.  On a mesh each rank is in several
communicators, and lateness spreads: a rank delayed in one is late in the other.  So the time that the last
rank waited elsewhere since its previous collective of this communicator, beyond what the waiting rank
waited there, is not its fault: the ranks that it waited for caused the delay.

    shard group 2,3        rank 2  |== waits for 3 ==|
    replicate group 0,2    rank 0       |== waits for 2 ==|        <- in fact for 3
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fsdpbench.reports.analysis.activity import Activity, group_key
from fsdpbench.reports.analysis.records import Ns, Record
from fsdpbench.reports.readers import Trace
from fsdpbench.reports.readers.trace import Float64, Int8, Int64

NAMED_FROM = 0.6
"""Share of all waiting that a rank must cause to be reported as the straggler."""
WORTH_NAMING = 0.01
"""Share of the time that ranks must wait on average for a straggler to be reported."""


@dataclass(frozen=True, eq=False)
class CollectiveDurations:
    """One rank's collectives in launch order: type (as in `COLLECTIVE_TYPES`), bytes of the full buffer
    (-1 unknown), duration in ns, and communicator (index into `groups`; all ranks of a communicator have the
    same text for it; "" if the trace does not say)."""

    kind: Int8
    message: Int64
    duration: Int64
    group: Int64
    groups: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.kind)


@dataclass(frozen=True)
class GroupWaiting(Record, matched="matched_collectives"):
    """One communicator: its ranks that have traces, collectives matched, ns waited by rank."""

    group: str
    matched: int
    waited: dict[int, Ns]


@dataclass(frozen=True)
class Waiting(
    Record,
    matched="matched_collectives",
    caused="caused_share",
    straggler="",
    groups="communicators",
    unmatched="unmatched_communicators",
):
    """Which ranks waited, and for which.

    waited: ns by rank, over all matched collectives (`matched`).  caused: by rank, the share of all waiting
    that it causes.  straggler: the rank that causes most of it.  unmatched: communicators whose ranks'
    collectives differ in number or type.
    """

    matched: int
    waited: dict[int, Ns]
    caused: dict[int, float]
    straggler: int | None
    groups: tuple[GroupWaiting, ...] = ()
    unmatched: tuple[str, ...] = ()


def collective_durations(trace: Trace, activity: Activity) -> CollectiveDurations:
    """Return the durations of a trace's collectives, in launch order."""
    collectives = activity.collectives
    order = np.argsort(collectives.work.asked(), kind="stable")
    duration = (collectives.work.end - collectives.work.start)[order]
    numbers: dict[str, int] = {}
    keys = (group_key(trace.collectives.get(row)) for row in collectives.work.row[order].tolist())
    group = np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)
    return CollectiveDurations(
        collectives.kind[order], collectives.message[order], duration, group, tuple(numbers)
    )


def find_waiting(ranks: Mapping[int, CollectiveDurations], time: int) -> Waiting | None:
    """Return the waiting by rank, or None if no communicator's collectives match between two ranks.

    Args:
        ranks: by rank; all ranks of a communicator have the same text for it.
        time: ns, the total length of the traced steps, averaged over ranks.
    """
    found, unmatched = _communicators(ranks)
    if not found:
        return None
    numbers = list(ranks)
    blame = _blame(found, numbers, ranks)
    groups = tuple(each.waiting() for each in found)
    waited = {number: sum(group.waited.get(number, 0) for group in groups) for number in numbers}
    everything = sum(waited.values())
    shares = (blame / (everything or 1)).tolist()
    caused = dict(zip(numbers, shares, strict=True))
    worst = max(numbers, key=lambda number: caused[number])
    named = caused[worst] >= NAMED_FROM and everything >= WORTH_NAMING * time * (len(numbers) - 1)
    matched = sum(group.matched for group in groups)
    return Waiting(matched, waited, caused, worst if named else None, groups, tuple(unmatched))


@dataclass(frozen=True, eq=False)
class _Communicator:
    """A communicator whose collectives match. `rows`: each member's table rows, one per collective; `waits`:
    ns, members x collectives."""

    name: str
    members: tuple[int, ...]
    rows: dict[int, Int64]
    waits: Int64

    def waiting(self) -> GroupWaiting:
        waited = dict(zip(self.members, self.waits.sum(axis=1).tolist(), strict=True))
        return GroupWaiting(self.name, self.waits.shape[1], waited)


def _communicators(ranks: Mapping[int, CollectiveDurations]) -> tuple[list[_Communicator], list[str]]:
    """Return the communicators of two or more ranks whose collectives match, and the names of the others."""
    found: list[_Communicator] = []
    unmatched: list[str] = []
    for name in dict.fromkeys(name for each in ranks.values() for name in each.groups):
        members = tuple(number for number, each in ranks.items() if name in each.groups)
        if len(members) < 2:
            continue
        rows = {
            number: np.flatnonzero(ranks[number].group == ranks[number].groups.index(name))
            for number in members
        }
        if not _alike([(ranks[number], rows[number]) for number in members]):
            unmatched.append(name)
            continue
        durations = np.stack([ranks[number].duration[rows[number]] for number in members])
        found.append(_Communicator(name, members, rows, durations - durations.min(axis=0)))
    return found, unmatched


def _alike(tables: Sequence[tuple[CollectiveDurations, Int64]]) -> bool:
    first, first_rows = tables[0]
    return all(
        len(rows) == len(first_rows)
        and bool((table.kind[rows] == first.kind[first_rows]).all())
        and bool((table.message[rows] == first.message[first_rows]).all())
        for table, rows in tables[1:]
    )


def _blame(
    communicators: Sequence[_Communicator], numbers: Sequence[int], ranks: Mapping[int, CollectiveDurations]
) -> Float64:
    """Return the ns of waiting that each rank causes."""
    place = {number: index for index, number in enumerate(numbers)}
    if len(communicators) == 1:
        only = communicators[0]
        latest = np.array([place[number] for number in only.members])[np.argmin(only.waits, axis=0)]
        sums = np.bincount(latest, weights=only.waits.sum(axis=0), minlength=len(numbers))
        return sums.astype(np.float64)
    # Row r: ns that rank r has waited, by culprit; `last`: the same after its last turn in each communicator.
    owed = np.zeros((len(numbers), len(numbers)))
    last = {each.name: np.zeros((len(each.members), len(numbers))) for each in communicators}
    for which, turn in _in_order(communicators, ranks):
        communicator = communicators[which]
        members = [place[number] for number in communicator.members]
        waits = communicator.waits[:, turn].astype(np.float64)
        elsewhere = owed[members] - last[communicator.name]
        behind = int(np.argmin(waits))
        passed_on = np.zeros(len(members))
        total = float(elsewhere[behind].sum())
        if total > 0:
            passed_on = np.clip(total - elsewhere.sum(axis=1), 0, waits)
            owed[members] += np.outer(passed_on, elsewhere[behind] / total)
        owed[members, members[behind]] += waits - passed_on
        last[communicator.name] = owed[members]
    blame: Float64 = owed.sum(axis=0)
    return blame


def _in_order(
    communicators: Sequence[_Communicator], ranks: Mapping[int, CollectiveDurations]
) -> list[tuple[int, int]]:
    """Return (communicator, number of its collective) in an order that agrees with that of every rank. If
    ranks issue in different orders, the order of communicators decides."""
    queues: dict[int, list[tuple[int, int]]] = {}
    for number in ranks:
        own = [
            (int(row), which, turn)
            for which, each in enumerate(communicators)
            if number in each.rows
            for turn, row in enumerate(each.rows[number].tolist())
        ]
        queues[number] = [(which, turn) for _, which, turn in sorted(own)][::-1]
    done: list[tuple[int, int]] = []
    nexts = [0] * len(communicators)
    remaining = sum(each.waits.shape[1] for each in communicators)
    while remaining:
        ready = [
            which
            for which, each in enumerate(communicators)
            if nexts[which] < each.waits.shape[1]
            and all(queues[number][-1] == (which, nexts[which]) for number in each.members)
        ]
        if not ready:
            ready = [next(w for w, each in enumerate(communicators) if nexts[w] < each.waits.shape[1])]
        for which in ready:
            item = (which, nexts[which])
            done.append(item)
            for number in communicators[which].members:
                if queues[number][-1] == item:
                    queues[number].pop()
                else:
                    queues[number].remove(item)
            nexts[which] += 1
            remaining -= 1
    return done
