"""The first call in which two ranks differ.

Only ranks of one group must agree: their calls are compared group by group, in order. Two ranks without a
common group share no sequence, and neither do two groups of one rank: their calls may come in any order.

    group 0-7      rank 0   all_gather   all_gather   reduce_scatter
                   rank 1   all_gather   all_reduce   reduce_scatter
                                         ^ differ here

Inside `Join` (odd phases) a rank may have fewer calls: it shadows the calls of other ranks.
"""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fsdpbench.base.files.documents import table_beside
from fsdpbench.base.reading import one_line
from fsdpbench.script.rank_check.calls import Call, Ended, Group, RankLog, Stack

_PARTS = ("kind", "root", "sizes", "dtype", "reduction")


@dataclass(frozen=True)
class Difference:
    """A difference of two ranks: `rank` is the odd one out, `other` agrees with most. `kind`: the part of the
    call that differs, or `missing` (`rank` makes no such call), or how `rank` ended if `other` did not."""

    kind: str
    rank: int
    other: int
    group: Group | None
    call: Call | None
    """The call of `rank`, if it makes one."""
    other_call: Call | None
    number: int
    """The number of earlier calls of this group, equal on both."""
    error: str | None = None
    stood: Stack = ()


_At = tuple[int, Difference]
"""How early a difference comes in the logs of the ranks that differ, and the difference."""


def first_difference(logs: Sequence[RankLog]) -> Difference | None:
    """Return the earliest difference of two or more `logs`, by rank; None if all shared calls are equal."""
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
    return min(found, key=lambda at: at[0])[1] if found else None


_Numbered = tuple[int, Call]
"""The index of a call among all calls of its rank, and the call."""


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
    """Return the difference between ranks in one call. `row`: each rank's call, None if it has no more."""
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
            return order, Difference("missing", rank, usual, usual_call.group, None, usual_call, before)
        part = _differing_part(each[1], usual_call)
        if part is not None:
            return order, Difference(part, rank, usual, usual_call.group, each[1], usual_call, before)
    return None


def _calls_no_more(log: RankLog, phase: int) -> bool:
    """Return whether a rank without a call here never makes it: its log is not cut, and it shadows none."""
    if phase % 2:
        return False
    return log.is_whole or log.phase > phase


def _most(made: Sequence[tuple[int, _Numbered]]) -> tuple[int, Call]:
    """Return the first rank that makes the most frequent call, and that call."""
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
    """Yield a difference for each rank that ended badly while another rank did not."""
    well = [log for log in logs if log.ended in (Ended.OK, Ended.TOO_MANY)]
    for log in logs:
        if well and log not in well:
            number = len(log.calls)
            ranks = log.rank, well[0].rank
            yield number, Difference(log.ended.value, *ranks, None, None, None, number, log.error, log.stood)


_EFFECTS, _ENDS = table_beside(__file__, "comparison.toml").values()
"""The effects of a difference on real ranks, and what a rank that ends badly does, as text."""
_MOST_RANKS = 16
_LONGEST_ERROR = 300


def sentence(difference: Difference) -> str:
    """Return the difference as a sentence: the parts, the lines, and the effect on real ranks."""
    rank, other = difference.rank, difference.other
    if difference.other_call is None:
        how, is_refused = _ENDS[difference.kind], difference.kind == Ended.REFUSED
        # For out of memory, keep the requested size.
        beginning = (difference.error or "").partition(" GPU 0 has")[0]
        error = f" ({one_line(beginning, _LONGEST_ERROR)})" if difference.error else ""
        effect = "it was not compared further" if is_refused else "real ranks would wait for it"
        return f"rank {rank} {how}{error}{_at(difference.stood)} where rank {other} continues: {effect}"
    effect = f"{_EFFECTS[difference.kind]} (call {difference.number + 1} of the group)"
    expected = f"{called(difference.other_call)}{_at(difference.other_call.stack)}"
    if difference.call is None:
        return f"rank {rank} never joins {expected}, which rank {other} calls: {effect}"
    return (
        f"rank {rank} calls {called(difference.call)}{_at(difference.call.stack)} "
        f"where rank {other} calls {expected}: {effect}"
    )


def called(call: Call) -> str:
    """Return a call as `all_reduce(4 x 1024 float32, sum, group default)`."""
    what = " ".join(filter(None, (call.shown, call.dtype)))
    direction = "to" if call.kind in ("reduce", "gather", "gather_object") else "from"
    root = "" if call.root is None else f"{direction} rank {call.root}"
    group = "" if call.kind == "new_group" else f"group {group_name(call.group)}"
    return f"{call.kind}({', '.join(filter(None, (what, call.reduction, root, group)))})"


def group_name(group: Group) -> str:
    """Return `default`, or the purpose and the ranks of a group."""
    if group.description == "default":
        return "default"
    ranks = _ranks(group.ranks)
    again = f", number {group.number + 1} of these" if group.number else ""
    return f"{group.description} (ranks {ranks}{again})" if group.description else f"of ranks {ranks}{again}"


def to_dict(difference: Difference) -> dict[str, object]:
    """Return the difference as in `result.json`; the script's own lines come first in `stack`."""
    record: dict[str, object] = {
        "kind": difference.kind,
        "message": sentence(difference),
        "rank": difference.rank,
        "other_rank": difference.other,
        "calls_before": difference.number,
        "group": None if difference.group is None else group_name(difference.group),
    }
    for name, call in (("call", difference.call), ("other_call", difference.other_call)):
        record[name] = None if call is None else called(call)
        stack = difference.stood if call is None and name == "call" else () if call is None else call.stack
        record["stack" if name == "call" else "other_stack"] = [frame._asdict() for frame in stack]
    return record


def _at(stack: Stack) -> str:
    return f" at {os.path.basename(stack[0].file)}:{stack[0].line}" if stack else ""


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}-{ranks[-1]}"
    shown = ", ".join(map(str, ranks[:_MOST_RANKS]))
    return f"{shown}, ... {ranks[-1]}" if len(ranks) > _MOST_RANKS else shown
