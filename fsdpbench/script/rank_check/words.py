"""A difference between ranks in a sentence, and as it is in `result.json`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from fsdpbench.reports.reading import one_line
from fsdpbench.script.rank_check.calls import Call, Ended, Group, Stack
from fsdpbench.script.rank_check.comparison import Difference

_HANG = "real ranks would hang here"
_EFFECTS = {
    "kind": _HANG,
    "missing": _HANG,
    "sizes": "real ranks would hang here, or compute wrongly",
    "dtype": "real ranks would hang here, or compute wrongly",
    "root": "real ranks would hang here, or compute wrongly",
    "reduction": "real ranks would compute wrongly",
}
_ENDS = {
    Ended.RAISED: "raises",
    Ended.OOM: "runs out of memory",
    Ended.TIMEOUT: "does not end",
    Ended.CRASH: "dies",
}
_MOST_RANKS = 16
_LONGEST_ERROR = 300


def sentence(difference: Difference) -> str:
    """What differs, where, and what results from it."""
    rank, other = difference.rank, difference.other
    if difference.other_call is None:
        how = _ENDS[Ended(difference.kind)]
        error = f" ({_beginning(difference.error)})" if difference.error else ""
        return (
            f"rank {rank} {how}{error}{_at(difference.stood)} where rank {other} continues: "
            "real ranks would wait for it"
        )
    told = f"{_EFFECTS[difference.kind]} (call {difference.number + 1} of the group)"
    expected = f"{called(difference.other_call)}{_at(difference.other_call.stack)}"
    if difference.call is None:
        return f"rank {rank} never joins {expected}, which rank {other} calls: {told}"
    return (
        f"rank {rank} calls {called(difference.call)}{_at(difference.call.stack)} "
        f"where rank {other} calls {expected}: {told}"
    )


def called(call: Call) -> str:
    """A call: `all_reduce(4 x 1024 float32, sum, group default)`."""
    what = " ".join(filter(None, (call.shown, call.dtype)))
    root = "" if call.root is None else f"{_direction(call.kind)} rank {call.root}"
    group = "" if call.kind == "new_group" else f"group {group_name(call.group)}"
    return f"{call.kind}({', '.join(filter(None, (what, call.reduction, root, group)))})"


def group_name(group: Group) -> str:
    """`default`, or what the group is for and its ranks."""
    if group.description == "default":
        return "default"
    ranks = _ranks(group.ranks)
    again = f", number {group.number + 1} of these" if group.number else ""
    return f"{group.description} (ranks {ranks}{again})" if group.description else f"of ranks {ranks}{again}"


def to_dict(difference: Difference) -> dict[str, Any]:
    """As in `result.json`: `stack` has the script's own lines first, innermost first."""
    record: dict[str, Any] = {
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
        record["stack" if name == "call" else "other_stack"] = [frame.to_dict() for frame in stack]
    return record


def _beginning(error: str) -> str:
    """What matters of an error; of out of memory how much was asked for."""
    return one_line(error.partition(" GPU 0 has")[0], _LONGEST_ERROR)


def _direction(kind: str) -> str:
    return "to" if kind in ("reduce", "gather", "gather_object") else "from"


def _at(stack: Stack) -> str:
    return f" at {os.path.basename(stack[0].file)}:{stack[0].line}" if stack else ""


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}-{ranks[-1]}"
    shown = ", ".join(map(str, ranks[:_MOST_RANKS]))
    return f"{shown}, ... {ranks[-1]}" if len(ranks) > _MOST_RANKS else shown
