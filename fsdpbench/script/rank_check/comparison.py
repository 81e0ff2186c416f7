"""The first call in which two ranks differ.

Only ranks of one group must agree: their calls are compared group by group, one by one. Two ranks that share
no group share no sequence, and neither do two groups of one rank: their calls may come in any order.

    group 0-7      rank 0   all_gather   all_gather   reduce_scatter
                   rank 1   all_gather   all_reduce   reduce_scatter
                                         ^ differ here

Inside of `Join` (odd phases) a rank may have fewer calls: it shadows those of the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fsdpbench.script.rank_check.calls import Call, Ended, Group, RankLog, Stack

_PARTS = ("kind", "root", "sizes", "dtype", "reduction")


@dataclass(frozen=True)
class Difference:
    """`rank` is the odd one out, `other` one that goes with most. `kind`: which part of the call differs, or
    `missing` (`rank` makes no such call), or how `rank` ended while `other` continued."""

    kind: str
    rank: int
    other: int
    group: Group | None
    call: Call | None
    """What `rank` calls, if it calls something."""
    other_call: Call | None
    number: int
    """How many calls of this group came before, the same on both."""
    error: str | None = None
    stood: Stack = ()


class _At(NamedTuple):
    """A difference, and how early it came in the logs of those that differ."""

    order: int
    difference: Difference


def first_difference(logs: Sequence[RankLog]) -> Difference | None:
    """The earliest one; None if all that ranks share is the same. `logs` by rank, at least two."""
    streams = {log.rank: _streams(log) for log in logs}
    groups = dict.fromkeys(key for each in streams.values() for key in each)
    found = [
        at
        for ranks, number, lane in groups
        if len(members := [log for log in logs if log.rank in ranks]) > 1
        for at in [_in_group(members, [streams[log.rank].get((ranks, number, lane), []) for log in members])]
        if at is not None
    ]
    found += _ends(logs)
    return min(found, key=lambda at: at.order).difference if found else None


_Numbered = tuple[int, Call]
"""A call and its place among all calls of its rank."""


def _streams(log: RankLog) -> dict[tuple[Any, ...], list[_Numbered]]:
    streams: dict[tuple[Any, ...], list[_Numbered]] = {}
    for numbered in enumerate(log.calls):
        streams.setdefault(numbered[1].group.key, []).append(numbered)
    return streams


def _in_group(logs: Sequence[RankLog], streams: Sequence[list[_Numbered]]) -> _At | None:
    before = 0
    for phase in range(max((log.phase for log in logs), default=0) + 1):
        parts = [[each for each in stream if each[1].phase == phase] for stream in streams]
        for place in range(max(map(len, parts))):
            row = [part[place] if place < len(part) else None for part in parts]
            found = _in_row(logs, row, phase, before + place)
            if found is not None:
                return found
        before += max(map(len, parts))
    return None


def _in_row(logs: Sequence[RankLog], row: Sequence[_Numbered | None], phase: int, before: int) -> _At | None:
    """Whether the ranks differ in one call of theirs, None for those that make no more calls."""
    known = [
        (log.rank, each)
        for log, each in zip(logs, row, strict=True)
        if each is not None or _calls_no_more(log, phase)
    ]
    made = [(rank, each) for rank, each in known if each is not None]
    usual, usual_call = _most(made)
    order = min(place for _, (place, _) in made)
    for rank, each in known:
        if each is None:
            found = Difference("missing", rank, usual, usual_call.group, None, usual_call, before)
            return _At(order, found)
        part = _differing_part(each[1], usual_call)
        if part is not None:
            return _At(order, Difference(part, rank, usual, usual_call.group, each[1], usual_call, before))
    return None


def _calls_no_more(log: RankLog, phase: int) -> bool:
    """Whether a rank without a call here will never make it: not one that was cut short, and not one that
    shadows the others'."""
    if phase % 2:
        return False
    return log.is_whole or log.phase > phase


def _most(made: Sequence[tuple[int, _Numbered]]) -> tuple[int, Call]:
    """The call that most ranks make, and the first rank that makes it."""
    counts = Counter(_signature(call) for _, (_, call) in made)
    rank, (_, call) = max(made, key=lambda each: (counts[_signature(each[1][1])], -each[0]))
    return rank, call


def _signature(call: Call) -> tuple[Any, ...]:
    return tuple(getattr(call, part) for part in _PARTS)


def _differing_part(call: Call, other: Call) -> str | None:
    for part in _PARTS:
        mine, theirs = getattr(call, part), getattr(other, part)
        if mine != theirs and not (part == "sizes" and None in (mine, theirs)):
            return part
    return None


def _ends(logs: Sequence[RankLog]) -> Iterator[_At]:
    """Ranks that ended badly while another one did not."""
    well = [log for log in logs if log.ended in (Ended.OK, Ended.TOO_MANY)]
    for log in logs:
        if well and log not in well:
            found = Difference(
                log.ended.value,
                log.rank,
                well[0].rank,
                None,
                None,
                None,
                len(log.calls),
                log.error,
                log.stood,
            )
            yield _At(len(log.calls), found)
