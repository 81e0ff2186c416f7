"""What a baseline may be made of: a whole sweep, in which every configuration gave an answer with figures."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from fsdpbench.check import LEAVE_OUT as FLAG
from fsdpbench.check.records.sides import Side
from fsdpbench.check.records.strict import check_names
from fsdpbench.errors import CannotJudgeError
from fsdpbench.reports.reading import one_line
from fsdpbench.results.records import Status

_NAMED = 5
_LONGEST = 500


def whole(side: Side, leave_out: Collection[str]) -> Side:
    """`side` without `leave_out`. Raises `CannotJudgeError` naming every other configuration that failed, is
    not finished or has an impossible figure; `UsageError` for a name that the sweep does not have."""
    check_names(leave_out, [*side.entries, *side.absent], side.label, "", f"configuration ({FLAG})")
    kept = replace(
        side,
        entries={name: entry for name, entry in side.entries.items() if name not in leave_out},
        absent={name: reason for name, reason in side.absent.items() if name not in leave_out},
    )
    flaws = flaws_of(kept)
    if flaws:
        told = [one_line(f"{name}: {flaw}", _LONGEST) for name, flaw in flaws.items()]
        shown = "; ".join(told[:_NAMED])
        more = f"; and also {', '.join(list(flaws)[_NAMED:])}" if len(flaws) > _NAMED else ""
        raise CannotJudgeError(
            f"{side.label}: no baseline can be made of what failed or is not finished: {shown}{more}. "
            f"Run the sweep again (--retry-failed), or leave a configuration out with `{FLAG} NAME`"
        )
    if not kept.entries:
        raise CannotJudgeError(f"{side.label}: no configuration is left for a baseline")
    return kept


def flaws_of(side: Side) -> dict[str, str]:
    """Why a configuration cannot be compared with, by name."""
    flaws = dict(side.absent)
    most = max((len(entry.runs) for entry in side.entries.values() if entry.status.is_answer), default=0)
    for name, entry in side.entries.items():
        if not entry.status.is_answer:
            flaws[name] = f"ended with {entry.status.value}" + (f" ({entry.cause})" if entry.cause else "")
        elif entry.status is Status.OK:
            broken = next((f"{figure} {why}" for figure, why in entry.flaws().items()), None)
            if broken is not None:
                flaws[name] = broken
            elif len(entry.runs) < most:
                flaws[name] = f"has {len(entry.runs)} of {most} runs"
    return flaws
