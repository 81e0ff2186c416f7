"""Find changes that may speed up a script in its observed run, before simulating them; and faults of its
gradients: they do not exist, some ranks never reduce them, or no optimizer uses them."""

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

from fsdpbench.answers.advise.edits import Edit
from fsdpbench.base.files.documents import table_beside
from fsdpbench.base.reading import JsonObject
from fsdpbench.base.result_sections import (
    GradientFinding,
    GradientReport,
    ObservedScript,
    Place,
    ShardingCall,
)
from fsdpbench.base.settings import varied
from fsdpbench.reports.result import Result
from fsdpbench.script.variations.programs import OF_CHECKPOINT

_NEEDLESS = ("synchronize(", "empty_cache(", "barrier(")
"""Calls that a training step does not need."""
_TRAINS = re.compile(r"\.(?:backward|step|zero_grad|update)\(|clip_grad_(?:norm|value)_\(|\bmodel\(")
"""Calls that train: no advice may remove them from a step."""
_ASSIGNS = re.compile(r"[\w.\[\]'\", ]+[-+*/|]?=(?!=)")
_READS = re.compile(r"\.item\(\)|\.cpu\(\)|\.tolist\(\)")
_PAIR = 2
_EVERY = 100
"""Recommended logging interval in steps."""
_FSDP = "from torch.distributed.fsdp import "

_Said = tuple[str, tuple[Edit, ...] | None, Mapping[str, object]]
"""The row of `advice.toml`, edits, and more words to fill in besides those of the finding."""


class Kind(StrEnum):
    """wrong: the script does not train. fault: reported whatever its gain. mistake: the script's setting is
    worse than the default. free: the training does not change. choice: the batch, or the start of the
    training, changes. no_effect: reported if the setting changes nothing."""

    WRONG = "wrong"
    FAULT = "fault"
    MISTAKE = "mistake"
    FREE = "free"
    CHOICE = "choice"
    NO_EFFECT = "no_effect"


@dataclass(frozen=True)
class Candidate:
    """A change that may help. `variation`: the variation to simulate (`script/variations`; none if empty).
    `place`: the line of the script (`train.py:12`); `what`: the problem; `write`: what to write; `edits`: the
    edits, or why there are none. `changes_work`: a step trains on other samples."""

    variation: str
    kind: Kind
    place: str
    what: str
    write: str
    edits: tuple[Edit, ...] | str = ()
    changes_work: bool = False
    worth: float = 0.03
    """For `free` candidates: the minimum gain to recommend it."""
    most: float | None = None
    """The upper bound of its gain, if it is not simulated because the bound is too small."""


class _Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A row of `advice.toml`; the comment at the top of that file explains the fields."""

    what: str
    write: str
    variation: str = ""
    kind: Kind = Kind.WRONG
    no_edits: str = ""
    worth: float = 0.03
    changes_work: bool = False


@functools.cache
def _rows() -> Mapping[str, _Row]:
    return msgspec.convert(table_beside(__file__, "advice.toml"), dict[str, _Row])


def advice(
    name: str,
    place: str,
    edits: tuple[Edit, ...] | None = None,
    kind: Kind | None = None,
    words: Mapping[str, object] | None = None,
) -> Candidate:
    """Return the candidate of a row, with `words` filled in. Without `edits` the row has the reason."""
    row, words = _rows()[name], words or {}
    what, write = row.what.format_map(words), row.write.format_map(words)
    done = row.no_edits if edits is None else edits
    return Candidate(row.variation, kind or row.kind, place, what, write, done, row.changes_work, row.worth)


def gradients(seen: ObservedScript, result: Result) -> Iterator[Candidate]:
    """Yield faults of gradients: parameters that are not trained, or that each rank trains separately."""
    found = seen.gradients
    for each in found.findings:
        kind = Kind.WRONG
        if each.kind == "unheld" or (each.cause == "unused" and each.count < found.parameters):
            kind = Kind.FAULT
            if each.cause and result.placeholder_decisions:
                continue  # the script may have branched on values that simulated tensors do not have
        row, edits, words = _CAUSES[each.cause](each, seen)
        words = {**each.as_words(), **words, "matter": _matter(each, found)}
        yield advice(row, each.short, edits, kind, words)


def _matter(each: GradientFinding, found: GradientReport) -> str:
    of = f"all {each.count} trainable parameters"
    if each.count < found.parameters:
        listed = _listed(each.names, each.count)
        of = f"{each.count} of {found.parameters} trainable parameters ({listed})"
    if each.kind == "unheld":
        return f"{each.count} parameters ({_listed(each.names, each.count)}) are in no optimizer"
    if each.kind == "without":
        return f"{of} have no gradient in any step"
    if each.kind == "late":
        return f"gradients of {of} are not reduced after the last backward of a step, so ranks train apart"
    if each.ranks > 1:
        return f"gradients of {of} are reduced over {each.ranks} of the {found.world} ranks only"
    return f"gradients of {of} are exchanged in none of these steps, so each rank trains by itself"


def _listed(names: list[str], count: int) -> str:
    return ", ".join(names[:2]) + (", ..." if count > 2 else "")


def _off(each: GradientFinding, seen: ObservedScript) -> _Said:
    if each.switch == "no_sync":
        context = Edit(each, "replace", ("contextlib.nullcontext()",))
        return "no_sync", (context, Edit(each, "imports", ("import contextlib",))), {}
    return "off-late" if each.kind == "late" else "off", (Edit(each, "argument", ("True",)),), {}


def _group(each: GradientFinding, seen: ObservedScript) -> _Said:
    others = [call for call in seen.sharding if call.api == each.api and call.short != each.short]
    group = "mesh" if each.api == "fully_shard" else "device_mesh"
    group, shape = group if each.has_mesh else "process_group", each.shape
    edits = tuple(Edit(call, "drop", (group,)) for call in (each, *others))
    words = {"group": group, "ranks": "x".join(map(str, shape))}
    if each.api != "FullyShardedDataParallel" or shape[-1] > 1 or len(shape) == 1:
        return "group", edits, words
    edits += (
        Edit(each, "keyword", ("sharding_strategy", "ShardingStrategy.NO_SHARD")),
        Edit(each, "imports", ("from torch.distributed.fsdp import ShardingStrategy",)),
    )
    return "group-of-one", edits, words


def _ignored(each: GradientFinding, seen: ObservedScript) -> _Said:
    name = each.ignored
    return ("ignored", (Edit(each, "drop", (name,)),), {}) if name else ("ignored-elsewhere", None, {})


_CAUSES: Mapping[str, Callable[[GradientFinding, ObservedScript], _Said]] = {
    "off": _off,
    "group": _group,
    "ignored": _ignored,
    "reentrant": lambda each, seen: ("reentrant", (Edit(each, "keyword", ("use_reentrant", "False")),), {}),
    "replaced": lambda each, seen: ("replaced", (Edit(each, "moved", (each.wrapped_span,)),), {}),
    "unused": lambda each, seen: ("unused", None, {}),
    "": lambda each, seen: ("unheld", None, {}),
    "bare": lambda each, seen: ("bare", None, {}),
    "hook": lambda each, seen: ("hook", (Edit(each, "without"),), {}),
}


# Rules for mistakes that are not settings. Rules without a variation to simulate give only findings.


def habits(seen: ObservedScript, result: Result) -> Iterator[Candidate]:
    """Yield mistakes in a script, and calls that cost time without a benefit."""
    for name, edit in _HABITS.items():
        found: Place | None = getattr(seen, name)
        if found is not None:
            edits = (Edit(found, *edit),) if edit and found.file else None
            yield advice(name, found.short, edits, words=found.as_words())
    if norms := seen.norms:
        waiting = any(wait.file == norms.file and wait.line == norms.line for wait in seen.waits)
        yield advice("norms-waiting" if waiting else "norms", norms.short, words=norms.as_words())


_HABITS: Mapping[str, tuple[Any, ...]] = {
    "backward_in_autocast": (),
    "launch_blocking": ("without",),
    "anomaly": ("without",),
    "zeroed": ("keyword", ("set_to_none", "True")),
}
"""The edit that corrects each observed mistake; empty if there is none."""


def candidates(result: Result) -> list[Candidate]:
    """Return the changes that may help the script of this result, except for its data loader."""
    seen = result.observed
    return [] if seen is None else [candidate for rule in _RULES for candidate in rule(seen, result)]


def _each(calls: Sequence[Place], do: str, *more: Any) -> tuple[Edit, ...]:
    """Return the same edit for every call."""
    return tuple(Edit(call, do, more) for call in calls)


def _set(calls: Sequence[Place], name: str, value: str, imported: str = "") -> tuple[Edit, ...]:
    """Return the edits that set an argument of every call, and add the import that its value needs."""
    edits = _each(calls, "keyword", name, value)
    return edits + _each(calls[:1], "imports", f"{_FSDP}{imported}") if imported else edits


def _written(variation: str, *, is_fsdp1: bool) -> tuple[str, str]:
    """Return the name and value of a variation's argument, from the table of settings."""
    trade = varied(variation)
    name, _, value = (trade.fsdp1 if is_fsdp1 else trade.fsdp2).partition("=")
    return name, value


def _waits(seen: ObservedScript, result: Result) -> Iterator[Candidate]:
    norms = seen.norms or Place()  # another rule handles these
    waits = [wait for wait in seen.waits if (wait.file, wait.line) != (norms.file, norms.line)]
    if seen.anomaly:  # another rule handles these too
        waits = [wait for wait in waits if ".backward(" not in wait.text]
    if not waits:
        return
    first = waits[0]
    others = "".join(f" (also {each.short})" for each in waits[1:2])
    if first.copies:
        useless = "; non_blocking=True has no effect on it" if "non_blocking=True" in first.text else ""
        pageable = [each for each in seen.loaders if not each.pin_memory]
        pinned = "pin_memory=True in the DataLoader" if pageable else ".pin_memory() where the tensor is made"
        edits = *_set(pageable, "pin_memory", "True"), Edit(first, "keyword", ("non_blocking", "True"))
        words = {"useless": useless, "pinned": pinned}
        yield advice("copies", first.short, edits if pageable else None, words=words)
        return
    called = first.called
    by = f", called by {called.short}" if called else ""
    write = _seldom((called or first).text)
    do = "without" if write.startswith("without: ") else "detached" if ".detach()" in write else "seldom"
    changed = _each([called or first], do, *([_EVERY] if do == "seldom" else []))
    needed = write.startswith(("without what", "only every"))
    words = {"by": by, "others": others, "write": write}
    yield advice("waits", first.short, None if needed else changed, words=words)


def _seldom(text: str) -> str:
    """Return the line to write instead of a line that waits for the GPU."""
    if any(call in text for call in _NEEDLESS):
        return f"without: {text}"
    if found := re.fullmatch(r"(if|elif|while) (.+?):(.*)", text):
        return f"{found[1]} step % {_EVERY} == 0 and ({found[2]}):{found[3]}"
    if _TRAINS.search(text) and not _ASSIGNS.match(text):
        return f"without what waits in it: {text}"
    if _ASSIGNS.match(text) or ".append(" in text:  # the stored value is needed in each step
        kept = _READS.sub(".detach()", text)
        kept = re.sub(r"\bfloat\(([\w.]+)\)", r"\1.detach()", kept).replace(".detach().detach()", ".detach()")
        if kept != text:
            return f"{kept}, and read it every {_EVERY} steps"
        if _TRAINS.search(text):
            return f"without what waits in it: {text}"
    if text.startswith(("for ", "with ", "return ", "assert ", "else")) or not text:
        return f"only every {_EVERY} steps: {text}"
    return f"if step % {_EVERY} == 0: {text}"


def _units(seen: ObservedScript, result: Result) -> Iterator[Candidate]:
    model, calls, blocks = seen.model, seen.sharding, seen.model.blocks
    if not calls:
        return
    last, is_fsdp1 = calls[-1], calls[-1].is_fsdp1
    place, path = last.short, blocks.path if blocks else ""
    if model.unwrapped_root:
        count = model.unsharded_parameters
        row, wrapped = ("root-fsdp1", None) if is_fsdp1 else ("root", (Edit(last, "around", (path,)),))
        yield advice(row, place, wrapped, Kind.WRONG if count else None, {"count": count})
        return
    classes, stacks = model.unit_classes, model.stacks
    together = max(call.together for call in calls)
    if blocks is None:
        return
    fine = classes == {blocks.kind: blocks.count}
    fine |= bool(stacks) and model.units == 1 + sum(stacks.values())
    if fine and together <= _PAIR:
        return
    alone = model.units <= 1
    row = "blocks-together" if together > _PAIR else "blocks-alone" if alone else "blocks"
    root = re.search(r"fully_shard\((\w+)", last.text)
    write = f"before it: for block in {root[1] if root else 'model'}.{path}: fully_shard(block)"
    edits = (*_each(calls[:-1], "without"), Edit(last, "before", (f"for block in {{0}}.{path}: {{like}}",)))
    if is_fsdp1:
        write = f"auto_wrap_policy=ModuleWrapPolicy({{{blocks.kind}}})"
        policy = f"ModuleWrapPolicy({{type(next({{0}}.{path}.children()))}})"
        edits = _set([last], "auto_wrap_policy", policy)
        edits += (Edit(last, "imports", ("from torch.distributed.fsdp.wrap import ModuleWrapPolicy",)),)
    words = {"units": model.units, "classes": ", ".join(classes), "count": blocks.count}
    words |= {"together": together, "write": write}
    yield advice(row, place, edits, Kind.FAULT if alone else None, words)


def _checkpointing(seen: ObservedScript, result: Result) -> Iterator[Candidate]:
    if found := seen.checkpointing:
        yield advice("no-checkpoint", found.short, not_recomputed(seen), words=found.as_words())
    if saved := seen.saved_on_host:
        yield advice("no-save-on-cpu", saved.short, not_saved(seen), words=saved.as_words())


def not_saved(seen: ObservedScript) -> tuple[Edit, ...] | None:
    """Return the edits after which nothing is saved on the host; None if the line does not show how."""
    if (found := seen.saved_on_host) is None:
        return ()
    edits = (
        Edit(found, "replace", ("contextlib.nullcontext()",)),
        Edit(found, "imports", ("import contextlib",)),
    )
    return edits if "save_on_cpu(" in found.text else None


def not_recomputed(seen: ObservedScript) -> tuple[Edit, ...]:
    """Return the edits after which the script recomputes nothing."""
    found = seen.checkpointing
    return () if found is None else (Edit(found, "bare", (OF_CHECKPOINT,)),)


def _leaves(seen: ObservedScript) -> list[ShardingCall]:
    """Return the calls that wrap parts of the model: all but the last if there are several."""
    calls = seen.sharding
    return list(calls[:-1] if len(calls) > 1 else calls)


def _sharding(seen: ObservedScript, result: Result) -> Iterator[Candidate]:
    calls = seen.sharding
    if not calls:
        return
    call = calls[0]
    given, place, is_fsdp1 = call.arguments, call.short, call.is_fsdp1
    strategy = str(given.get("sharding_strategy") or "FULL_SHARD")
    if offloaded := [each for each in calls if each.arguments.get("offload")]:
        offload = "cpu_offload" if is_fsdp1 else "offload_policy"
        edits = (*_each(offloaded, "drop", offload), Edit(offloaded[0], "made_on_device"))
        yield advice("no-offload", offloaded[0].short, edits, words={"offload": offload})
    kept = [each for each in calls if each.arguments.get("reshard_after_forward") is False]
    kept = calls if strategy == "SHARD_GRAD_OP" else kept
    name, value = _written("reshard" if kept else "keep", is_fsdp1=is_fsdp1)
    needed = "ShardingStrategy" if is_fsdp1 else ""
    if kept and result.alloc_retries_per_step:
        edits = _set(kept, name, value, needed)
        yield advice("reshard", kept[0].short, edits, words={"write": f"{name}={value}"})
    elif not kept and strategy == "FULL_SHARD" and seen.model.units > 1:
        yield advice("keep", place, _set(calls, name, value, needed), words={"write": f"{name}={value}"})
    yield from _hybrid(calls, result.config or {}, strategy)
    yield from _gathered_types(seen, place, is_fsdp1=is_fsdp1)


def _hybrid(calls: Sequence[ShardingCall], config: JsonObject, strategy: str) -> Iterator[Candidate]:
    each, is_fsdp1 = config.get("gpus_used_per_node") or config["gpus_per_node"], calls[0].is_fsdp1
    nodes = config["gpus"] // each
    if (
        nodes < 2
        or config["gpus"] % each
        or calls[0].arguments.get("mesh") not in (None, 1)
        or strategy != "FULL_SHARD"
    ):
        return
    mesh = f'init_device_mesh("cuda", ({nodes}, {each}), mesh_dim_names=("replicate", "shard"))'
    more = "sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=" if is_fsdp1 else "mesh="
    edits = (
        Edit(calls[-1], "beside", ([call.span for call in calls], [f"hybrid_mesh = {mesh}"], [])),
        *_set(calls, "device_mesh" if is_fsdp1 else "mesh", "hybrid_mesh"),
        Edit(calls[0], "imports", ("from torch.distributed.device_mesh import init_device_mesh",)),
    )
    if is_fsdp1:
        edits += _set(calls, "sharding_strategy", "ShardingStrategy.HYBRID_SHARD", "ShardingStrategy")
    yield advice("hybrid", calls[0].short, edits, words={"write": more + mesh})


def _gathered_types(seen: ObservedScript, place: str, *, is_fsdp1: bool) -> Iterator[Candidate]:
    calls = seen.sharding
    if calls[0].arguments.get("param_dtype") not in (None, "None", "torch.float32"):
        return
    casts = seen.computes_in in ("bf16", "fp16") and seen.model.dtype == "torch.float32"
    if seen.computes_in != "fp32" and not casts:
        return
    name, policy = _written("bf16", is_fsdp1=is_fsdp1)
    edits = (
        *_set(calls, name, policy, policy.partition("(")[0]),
        Edit(calls[0], "imports", ("import torch",)),
    )
    words = {"computes_in": seen.computes_in, "write": f"{name}={policy}"}
    yield advice("casts" if casts else "fp32", place, edits, words=words)


def _prefetch(seen: ObservedScript, result: Result) -> Iterator[Candidate]:
    calls, model = seen.sharding, seen.model
    if not calls:
        return
    call, place, is_fsdp1 = calls[-1], calls[-1].short, calls[-1].is_fsdp1
    given, blocks = call.arguments, model.blocks
    of_blocks = blocks is not None and model.unit_classes == {blocks.kind: blocks.count}
    of_blocks &= call.count == 1 and not model.unwrapped_root
    if given.get("forward_prefetch") or seen.forward_prefetch:
        asked = seen.forward_prefetch or call
        left = _each([asked], *(("drop", "forward_prefetch") if asked is call else ("without",)))
        yield advice("no-forward-prefetch", asked.short, left)
    elif model.units > 1:
        late = given.get("backward_prefetch", "BACKWARD_PRE")
        name, value = _written("backward-prefetch", is_fsdp1=True)
        early = _set([call], name, value, "BackwardPrefetch")
        if is_fsdp1 and late != "BACKWARD_PRE":
            words = {"late": late, "write": f"{name}={value}"}
            yield advice("late-prefetch" if late else "no-prefetch", place, early, words=words)
        edits: tuple[Edit, ...] | None = None
        write = varied("prefetch").fsdp2
        if is_fsdp1:
            name, value = _written("prefetch", is_fsdp1=True)
            write, edits = f"{name}={value}", _set([call], name, value)
            edits += early if late != "BACKWARD_PRE" else ()
        elif of_blocks and blocks is not None:
            text = write.replace("blocks", f"{{0}}.{blocks.path}")
            edits = Edit(call, "after", (text,)), Edit(call, "imports", ("from itertools import pairwise",))
        yield advice("prefetch", place, edits, words={"write": write})
    if is_fsdp1 and given.get("limit_all_gathers") is False:
        left = _each([call], "drop", "limit_all_gathers")
        yield advice("limit", place, left)
        yield advice("limit-without-effect", place, left)
    if not is_fsdp1 and blocks and model.unit_classes.get(blocks.kind) == blocks.count:
        words = {"write": varied("wrap-pairs").fsdp2}
        yield advice("pairs", calls[0].short, (Edit(calls[0], "pairs"),), words=words)


def _choices(seen: ObservedScript, result: Result) -> Iterator[Candidate]:
    for made in seen.optimizers[:1]:
        if made.has_fused and not made.fused:
            edits = (Edit(made, "drop", ("foreach", False)), *_set([made], "fused", "True"))
            yield advice("fused", made.short, edits)
    batch, loaders = seen.batch, seen.loaders
    if batch is not None:
        yield advice("double-batch", "", words={"option": batch.option, "size": 2 * batch.value})
    elif loaders and loaders[0].batch_size:
        edits = (Edit(loaders[0], "doubled", ("batch_size",)),)
        doubled = {"size": 2 * loaders[0].batch_size}
        yield advice("double-batch-loader", loaders[0].short, edits, words=doubled)
    if seen.sharding and not result.compiled:
        edits = _each(_leaves(seen), "before", "{0}.compile()")
        words = {"write": varied("compile").fsdp2}
        yield advice("compile", seen.sharding[0].short, edits, words=words)


_Rule = Callable[[ObservedScript, Result], Iterator[Candidate]]
_RULES: tuple[_Rule, ...] = (
    gradients, habits, _waits, _units, _checkpointing, _sharding, _prefetch, _choices,
)  # fmt: skip
