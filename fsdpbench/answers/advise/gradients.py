"""Rules for gradients that do not exist, that some ranks never exchange, or that no optimizer uses; and for
habits that cost time for nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fsdpbench.answers.advise.candidate import Candidate, Kind, advice, place_of
from fsdpbench.answers.advise.edits import Edit

_Finding = Mapping[str, Any]
_Said = tuple[str, tuple[Edit, ...] | None, Mapping[str, Any]]
"""The row of `advice.toml`, edits, and words beside those of the finding."""


def gradients(seen: Mapping[str, Any], result: Mapping[str, Any]) -> Iterator[Candidate]:
    """Why nothing, or not all, is trained, or each rank by itself."""
    found = seen.get("gradients") or {}
    for each in found.get("findings", ()):
        kind = Kind.WRONG
        if each["kind"] == "unheld" or (each["cause"] == "unused" and each["count"] < found["parameters"]):
            kind = Kind.FAULT
            if each["cause"] and result.get("placeholder_decisions"):
                continue  # the script may have chosen by values that are not there
        row, edits, words = _CAUSES[each["cause"]](each, seen)
        yield advice(row, place_of(each), edits, kind, {**each, **words, "matter": _matter(each, found)})


def _matter(each: _Finding, found: Mapping[str, Any]) -> str:
    of = f"all {each['count']} trainable parameters"
    if each["count"] < found["parameters"]:
        listed = _listed(each["names"], each["count"])
        of = f"{each['count']} of {found['parameters']} trainable parameters ({listed})"
    if each["kind"] == "unheld":
        return f"{each['count']} parameters ({_listed(each['names'], each['count'])}) are in no optimizer"
    if each["kind"] == "without":
        return f"{of} have no gradient in any step"
    if each["kind"] == "late":
        return f"gradients of {of} are not reduced after the last backward of a step, so ranks train apart"
    if each["ranks"] > 1:
        return f"gradients of {of} are reduced over {each['ranks']} of the {found['world']} ranks only"
    return f"gradients of {of} are exchanged in none of these steps, so each rank trains by itself"


def _listed(names: list[str], count: int) -> str:
    return ", ".join(names[:2]) + (", ..." if count > 2 else "")


def _off(each: _Finding, seen: Mapping[str, Any]) -> _Said:
    if each["switch"] == "no_sync":
        context = Edit(each, "replace", ("contextlib.nullcontext()",))
        return "no_sync", (context, Edit(each, "imports", ("import contextlib",))), {}
    return "off-late" if each["kind"] == "late" else "off", (Edit(each, "argument", ("True",)),), {}


def _group(each: _Finding, seen: Mapping[str, Any]) -> _Said:
    others = [
        call for call in seen["sharding"] if call["api"] == each["api"] and place_of(call) != place_of(each)
    ]
    group = "mesh" if each["api"] == "fully_shard" else "device_mesh"
    group, shape = group if each["has_mesh"] else "process_group", each["shape"]
    edits = tuple(Edit(call, "drop", (group,)) for call in (each, *others))
    words = {"group": group, "ranks": "x".join(map(str, shape))}
    if each["api"] != "FullyShardedDataParallel" or shape[-1] > 1 or len(shape) == 1:
        return "group", edits, words
    edits += (
        Edit(each, "keyword", ("sharding_strategy", "ShardingStrategy.NO_SHARD")),
        Edit(each, "imports", ("from torch.distributed.fsdp import ShardingStrategy",)),
    )
    return "group-of-one", edits, words


def _ignored(each: _Finding, seen: Mapping[str, Any]) -> _Said:
    name = each.get("ignored")
    return ("ignored", (Edit(each, "drop", (name,)),), {}) if name else ("ignored-elsewhere", None, {})


_CAUSES: Mapping[str, Callable[[_Finding, Mapping[str, Any]], _Said]] = {
    "off": _off,
    "group": _group,
    "ignored": _ignored,
    "reentrant": lambda each, seen: ("reentrant", (Edit(each, "keyword", ("use_reentrant", "False")),), {}),
    "replaced": lambda each, seen: ("replaced", (Edit(each, "moved", (each["wrapped_span"],)),), {}),
    "unused": lambda each, seen: ("unused", None, {}),
    "": lambda each, seen: ("unheld", None, {}),
    "bare": lambda each, seen: ("bare", None, {}),
    "hook": lambda each, seen: ("hook", (Edit(each, "without"),), {}),
}


# Rules for mistakes that no setting changes. Those without a variant to simulate are findings only.


def habits(seen: Mapping[str, Any], result: Mapping[str, Any]) -> Iterator[Candidate]:
    """Yield what is wrong in a script, or costs time for nothing."""
    for name, edit in _HABITS.items():
        if found := seen.get(name):
            edits = (Edit(found, *edit),) if edit and found["file"] else None
            yield advice(name, place_of(found), edits, words=found)
    if norms := seen.get("norms"):
        waits: Sequence[_Finding] = seen.get("waits") or ()
        waiting = any(wait["file"] == norms["file"] and wait["line"] == norms["line"] for wait in waits)
        yield advice("norms-waiting" if waiting else "norms", place_of(norms), words=norms)


_HABITS: Mapping[str, tuple[Any, ...]] = {
    "backward_in_autocast": (),
    "launch_blocking": ("without",),
    "anomaly": ("without",),
    "zeroed": ("keyword", ("set_to_none", "True")),
}
"""What is seen of each, and the edit that corrects it."""
