"""Rules for gradients that do not exist, that some ranks never exchange, or that no optimizer uses."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from fsdpbench.answers.advise.edits import Edit

_Finding = Mapping[str, Any]


def gradients(seen: Mapping[str, Any], result: Mapping[str, Any]) -> Iterator[Candidate]:
    """Why nothing, or not all, is trained, or each rank by itself."""
    found = seen.get("gradients") or {}
    for each in found.get("findings", ()):
        kind = Kind.WRONG
        if each["kind"] == "unheld" or (each["cause"] == "unused" and each["count"] < found["parameters"]):
            kind = Kind.FAULT
            if each["cause"] and result.get("placeholder_decisions"):
                continue  # the script may have chosen by values that are not there
        why, write, edits = _CAUSES[each["cause"]](each, seen)
        place, what = place_of(each), f"{_matter(each, found)}: {why}"
        yield Candidate(NOT_SIMULATED, kind, place, what, write, edits)


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


def _off(each: _Finding, seen: Mapping[str, Any]) -> _Words:
    if each["switch"] == "no_sync":
        write = "the last backward before optimizer.step() outside of no_sync()"
        edits = (
            Edit(each, "replace", ("contextlib.nullcontext()",)),
            Edit(each, "imports", ("import contextlib",)),
        )
        return "no_sync() keeps their reduction off", write, edits
    write = f"model.{each['switch']}(True) before the last backward of a step"
    what = f"{each['switch']}(False) switches their reduction off, and nothing switches it on"
    what = "their reduction is switched off then" if each["kind"] == "late" else what
    return what, write, (Edit(each, "argument", ("True",)),)


def _group(each: _Finding, seen: Mapping[str, Any]) -> _Words:
    others = [
        call for call in seen["sharding"] if call["api"] == each["api"] and place_of(call) != place_of(each)
    ]
    group = "mesh" if each["api"] == "fully_shard" else "device_mesh"
    group, shape = group if each["has_mesh"] else "process_group", each["shape"]
    edits = tuple(Edit(call, "drop", (group,)) for call in (each, *others))
    if each["api"] != "FullyShardedDataParallel" or shape[-1] > 1 or len(shape) == 1:
        return f"its {group} has {'x'.join(map(str, shape))} ranks", f"without {group}=, for all ranks", edits
    edits += (
        Edit(each, "keyword", ("sharding_strategy", "ShardingStrategy.NO_SHARD")),
        Edit(each, "imports", ("from torch.distributed.fsdp import ShardingStrategy",)),
    )
    sizes = "x".join(map(str, shape))
    what = (
        f"its {sizes} {group} shards over one rank: FSDP1 falls back to NO_SHARD and reduces over that rank"
    )
    return what, f"sharding_strategy=ShardingStrategy.NO_SHARD, without {group}=", edits


def _ignored(each: _Finding, seen: Mapping[str, Any]) -> _Words:
    name = each.get("ignored")
    what = f"this wrapper ignores them{f' ({name}=)' if name else ''}, and nothing else reduces them"
    return what, f"without {name or 'ignoring them'}", (Edit(each, "drop", (name,)),) if name else _ELSEWHERE


_ELSEWHERE = "they are named elsewhere in the script"
_Words = tuple[str, str, tuple[Edit, ...] | str]
"""Why, what to write, and the edits that do it, or why there are none."""
_CAUSES: Mapping[str, Callable[[_Finding, Mapping[str, Any]], _Words]] = {
    "off": _off,
    "group": _group,
    "ignored": _ignored,
    "reentrant": lambda each, seen: (
        "no input of this reentrant checkpoint needs a gradient, so that its parameters get none",
        "use_reentrant=False, or inputs that need one (model.enable_input_require_grads())",
        (Edit(each, "keyword", ("use_reentrant", "False")),),
    ),
    "replaced": lambda each, seen: (
        f"the optimizer is made before the model is wrapped (line {each['wrapped_at']}), which replaces its "
        "parameters",
        f"after the model is wrapped: {each['text']}",
        (Edit(each, "moved", (each["wrapped_span"],)),),
    ),
    "unused": lambda each, seen: (
        "the loss does not depend on them (not used in forward, detached, or computed under no_grad)",
        "let the loss use them, or .requires_grad_(False); step() between backward() and zero_grad()",
        "which of these it is, a run does not show",
    ),
    "": lambda each, seen: (
        "they get gradients, which cost time and memory, and are not trained",
        "give them to the optimizer, or .requires_grad_(False) before the model is wrapped",
        "which of the two is meant, the script does not say",
    ),
    "bare": lambda each, seen: (
        "no wrapper has them, and the script reduces them nowhere",
        "wrap the module that holds them (fully_shard, DDP), or all_reduce their .grad before this line",
        "which wrapper is yours to choose",
    ),
    "hook": lambda each, seen: (
        "the communication hook does not reduce them",
        "without the hook, or all_reduce in it",
        (Edit(each, "without"),),
    ),
}


# Rules for mistakes that no setting changes. Those without a variant to simulate are findings only.


def habits(seen: Mapping[str, Any], result: Mapping[str, Any]) -> Iterator[Candidate]:
    """Yield what is wrong in a script, or costs time for nothing."""
    if found := seen.get("backward_in_autocast"):
        yield Candidate(
            NOT_SIMULATED,
            Kind.FAULT,
            place_of(found),
            "backward runs inside of autocast: torch advises against it, since backward's operators take "
            "the types of forward's by themselves",
            f"outside of the `with torch.autocast(...)` block: {found['text']}",
            "the end of the block is yours to move",
        )
    if found := seen.get("launch_blocking"):
        yield Candidate(
            NOT_SIMULATED,
            Kind.FAULT,
            place_of(found),
            "CUDA_LAUNCH_BLOCKING=1: the CPU waits for every kernel, and nothing is done beside another",
            "without it; it is for finding errors",
            (Edit(found, "without"),) if found["file"] else "it is in the environment",
        )
    if found := seen.get("anomaly"):
        yield Candidate(
            NOT_SIMULATED,
            Kind.FAULT,
            place_of(found),
            "autograd looks for NaN in every gradient, and the CPU waits for each answer",
            f"without it; it is for finding errors: {found['text']}",
            (Edit(found, "without"),),
        )
    if found := seen.get("zeroed"):
        yield Candidate(
            "none-grads",
            Kind.FAULT,
            place_of(found),
            "gradients are filled with zeros and added to, where dropping them costs nothing",
            "zero_grad(set_to_none=True), the default",
            (Edit(found, "keyword", ("set_to_none", "True")),),
        )
    if norms := seen.get("norms"):
        yield _single_norms(norms, seen.get("waits") or ())


def _single_norms(norms: Mapping[str, Any], waits: Sequence[Mapping[str, Any]]) -> Candidate:
    waiting = any(wait["file"] == norms["file"] and wait["line"] == norms["line"] for wait in waits)
    return Candidate(
        "no-waits" if waiting else NOT_SIMULATED,
        Kind.FAULT,
        place_of(norms),
        f"{norms['per_step']:,.0f} norms a step are taken one by one"
        + (", and the CPU waits for each" if waiting else ""),
        "torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm), which takes all at the same time",
        "the lines around it belong to it",
    )


NOT_SIMULATED = ""


class Kind(StrEnum):
    """wrong: the script does not train. fault: named whatever it gains. mistake: what the script asks for is
    worse than what it would get unasked. free: nothing of the training changes. choice: the batch, or the
    start of the training, changes. no_effect: named if it changes nothing."""

    WRONG = "wrong"
    FAULT = "fault"
    MISTAKE = "mistake"
    FREE = "free"
    CHOICE = "choice"
    NO_EFFECT = "no_effect"


@dataclass(frozen=True)
class Candidate:
    """`variation`: what is simulated (`script/variations`; nothing, where it is empty). `place`: the line of
    the script (`train.py:12`), `what` is the matter there, `write`: what to write, and `edits` that do it,
    or why there are none. `changes_work`: a step trains on other samples."""

    variation: str
    kind: Kind
    place: str
    what: str
    write: str
    edits: tuple[Edit, ...] | str = ()
    changes_work: bool = False
    worth: float = 0.03
    """The gain from which it is advice, of those that are `free`."""
    most: float | None = None
    """What it could gain at most, of one that is not simulated since that is too little."""


def place_of(call: Mapping[str, Any]) -> str:
    """`train.py:12`."""
    return f"{os.path.basename(call['file'])}:{call['line']}" if call.get("file") else ""
