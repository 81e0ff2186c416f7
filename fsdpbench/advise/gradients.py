"""Rules for gradients: those that do not exist, those that some ranks never exchange, those that no optimizer
uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fsdpbench.advise.candidate import NOT_SIMULATED, Candidate, Kind, place_of
from fsdpbench.advise.edits import Edit

_Finding = Mapping[str, Any]
_NO_SHARD = "sharding_strategy=ShardingStrategy.NO_SHARD"


def gradients(seen: Mapping[str, Any], result: Mapping[str, Any]) -> Iterator[Candidate]:
    """Why nothing, or not all, is trained, or each rank by itself."""
    found = seen.get("gradients") or {}
    if made := seen.get("early_optimizer"):
        yield Candidate(
            NOT_SIMULATED,
            Kind.WRONG,
            place_of(made),
            f"the optimizer is made before the model is wrapped (line {made['wrapped_at']}): it holds "
            "parameters that training no longer uses, and trains nothing",
            f"after the model is wrapped: {made['text']}",
            (Edit(made, "moved", (made.get("wrapped_span"),)),),
        )
        return
    for each in found.get("findings", ()):
        kind = Kind.WRONG
        if (each["kind"], each["cause"]) == ("without", "unused") and each["count"] < found["parameters"]:
            kind = Kind.FAULT
        what, write, edits, why = _CAUSES[each["cause"]](each, seen)
        what = f"{_matter(each, found)}: {what}"
        yield Candidate(NOT_SIMULATED, kind, place_of(each), what, write, edits, why)
    if names := found.get("unheld"):
        yield Candidate(
            NOT_SIMULATED,
            Kind.FAULT,
            "",
            f"{len(names)} parameters ({_listed(names, len(names))}) get gradients and are in no optimizer: they "
            "are not trained, and their gradients cost time and memory",
            "give them to the optimizer, or .requires_grad_(False) before the model is wrapped",
            (),
            "which of the two is meant, the script does not say",
        )


def _matter(each: _Finding, found: Mapping[str, Any]) -> str:
    of = f"{each['count']} of {found['parameters']} trainable parameters ({_listed(each['names'], each['count'])})"
    if each["count"] == found["parameters"]:
        of = f"all {each['count']} trainable parameters"
    if each["kind"] == "without":
        return f"{of} have no gradient in any step"
    if each["kind"] == "late":
        return f"gradients of {of} are not reduced after the last backward of a step, so ranks train apart"
    if each["ranks"] > 1:
        return f"gradients of {of} are reduced over {each['ranks']} of the {found['world']} ranks only"
    return f"gradients of {of} are exchanged in none of these steps, so each rank trains by itself"


def _listed(names: list[str], count: int) -> str:
    return ", ".join(names[:2]) + (", ..." if count > 2 else "")


_Words = tuple[str, str, tuple[Edit, ...], str]


def _off(each: _Finding, seen: Mapping[str, Any]) -> _Words:
    if each["switch"] == "no_sync":
        write = "the last backward before optimizer.step() outside of no_sync()"
        replaced = (
            Edit(each, "replace", ("contextlib.nullcontext()",)),
            Edit(each, "imports", ("import contextlib",)),
        )
        return "no_sync() keeps their reduction off", write, replaced, ""
    write = f"model.{each['switch']}(True) before the last backward of a step"
    what = f"{each['switch']}(False) switches their reduction off, and nothing switches it on"
    what = "their reduction is switched off then" if each["kind"] == "late" else what
    return what, write, (Edit(each, "argument", ("True",)),), ""


def _reentrant(each: _Finding, seen: Mapping[str, Any]) -> _Words:
    what = "no input of this reentrant checkpoint needs a gradient, so that it passes none to its parameters"
    write = "use_reentrant=False, or inputs that need one (model.enable_input_require_grads())"
    return what, write, (Edit(each, "keyword", ("use_reentrant", "False")),), ""


def _unused(each: _Finding, seen: Mapping[str, Any]) -> _Words:
    what = "the loss does not depend on them (not used in forward, detached, or computed under no_grad)"
    write = "let the loss use them, or .requires_grad_(False); step() between backward() and zero_grad()"
    return what, write, (), "which of these it is, a run does not show"


def _group(each: _Finding, seen: Mapping[str, Any]) -> _Words:
    calls = [
        each,
        *(
            call
            for call in seen["sharding"]
            if call["api"] == each["api"] and place_of(call) != place_of(each)
        ),
    ]
    named = "mesh" if each["api"] == "fully_shard" else "device_mesh"
    group = named if each["shape"][1:] or each["has_mesh"] else "process_group"
    sizes = "x".join(map(str, each["shape"]))
    edits = [Edit(call, "drop", (group,)) for call in calls]
    if each["api"] == "FullyShardedDataParallel" and each["shape"][-1] == 1:
        what = f"its {sizes} {group} shards over one rank, so that FSDP1 falls back to NO_SHARD and reduces over that rank"
        what = f"its {group} has one rank" if len(each["shape"]) == 1 else what
        if len(each["shape"]) > 1:
            edits += [
                Edit(each, "keyword", ("sharding_strategy", "ShardingStrategy.NO_SHARD")),
                Edit(each, "imports", ("from torch.distributed.fsdp import ShardingStrategy",)),
            ]
            return what, f"{_NO_SHARD}, without {group}=", tuple(edits), ""
    else:
        what = f"its {group} has {sizes} ranks"
    return what, f"without {group}=, for all ranks", tuple(edits), ""


def _ignored(each: _Finding, seen: Mapping[str, Any]) -> _Words:
    name = each.get("ignored") or ""
    what, write = (
        f"this wrapper ignores them{f' ({name}=)' if name else ''}",
        f"without {name or 'ignoring them'}",
    )
    why = "" if name else "they are named elsewhere in the script"
    return (
        f"{what}, and nothing else reduces them",
        write,
        (Edit(each, "drop", (name,)),) if name else (),
        why,
    )


def _bare(each: _Finding, seen: Mapping[str, Any]) -> _Words:
    write = "wrap the module that holds them (fully_shard, DistributedDataParallel), or all_reduce their .grad before this line"
    return (
        "no wrapper has them, and the script reduces them nowhere",
        write,
        (),
        "which wrapper is yours to choose",
    )


def _hook(each: _Finding, seen: Mapping[str, Any]) -> _Words:
    return (
        "the communication hook does not reduce them",
        "without the hook, or all_reduce in it",
        (Edit(each, "without"),),
        "",
    )


_CAUSES = {
    "off": _off, "reentrant": _reentrant, "unused": _unused, "group": _group, "ignored": _ignored, "bare": _bare,
    "hook": _hook,
}  # fmt: skip
