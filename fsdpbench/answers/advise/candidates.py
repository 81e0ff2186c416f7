"""The changes that a script may profit from, found in what it was seen to do, before any is simulated."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fsdpbench.answers.advise.edits import Edit
from fsdpbench.answers.advise.gradients import NOT_SIMULATED, Candidate, Kind, gradients, habits, place_of
from fsdpbench.base.settings import varied

_NEEDLESS = ("synchronize(", "empty_cache(", "barrier(")
"""Calls that a training step does not need."""
_TRAINS = re.compile(r"\.(?:backward|step|zero_grad|update)\(|clip_grad_(?:norm|value)_\(|\bmodel\(")
"""What trains: no advice may leave it out of a step."""
_ASSIGNS = re.compile(r"[\w.\[\]'\", ]+[-+*/|]?=(?!=)")
_READS = re.compile(r"\.item\(\)|\.cpu\(\)|\.tolist\(\)")
_PAIR = 2
_EVERY = 100
"""How often a script should log, in steps."""
_FSDP = "from torch.distributed.fsdp import "
_OF_CHECKPOINT = (
    "use_reentrant", "context_fn", "determinism_check", "debug", "early_stop", "preserve_rng_state",
)  # fmt: skip

_Seen = Mapping[str, Any]


def candidates(result: Mapping[str, Any]) -> list[Candidate]:
    """Return the changes that may help a script of this result; the starving loader is another question."""
    seen: _Seen = (result.get("script") or {}).get("observed") or {}
    if not seen:
        return []
    return [candidate for rule in _RULES for candidate in rule(seen, result)]


def _is_fsdp1(call: _Seen) -> bool:
    return bool(call["api"] != "fully_shard")


def _each(calls: Sequence[_Seen], do: str, *more: Any) -> tuple[Edit, ...]:
    """Return the same edit at every call."""
    return tuple(Edit(call, do, more) for call in calls)


def _set(calls: Sequence[_Seen], name: str, value: str, imported: str = "") -> tuple[Edit, ...]:
    """Return an argument of every call, and the import that its value needs."""
    edits = _each(calls, "keyword", name, value)
    return edits + _each(calls[:1], "imports", f"{_FSDP}{imported}") if imported else edits


def _written(variation: str, *, is_fsdp1: bool) -> tuple[str, str]:
    """Return name and value of the argument of a variation, from the table of settings."""
    trade = varied(variation)
    name, _, value = (trade.fsdp1 if is_fsdp1 else trade.fsdp2).partition("=")
    return name, value


def _waits(seen: _Seen, result: _Seen) -> Iterator[Candidate]:
    norms = seen.get("norms") or {}  # another rule is about these
    of_norms = (norms.get("file"), norms.get("line"))
    waits = [wait for wait in seen["waits"] if (wait["file"], wait["line"]) != of_norms]
    if seen.get("anomaly"):  # and about these
        waits = [wait for wait in waits if ".backward(" not in wait["text"]]
    if not waits:
        return
    first = waits[0]
    others = "".join(f" (also {place_of(each)})" for each in waits[1:2])
    if first["copies"]:
        useless = "; non_blocking=True has no effect on it" if "non_blocking=True" in first["text"] else ""
        what = f"every step copies from memory that is not pinned, and the CPU waits for it{useless}"
        pageable = [each for each in seen["loaders"] if not each["pin_memory"]]
        pinned = "pin_memory=True in the DataLoader" if pageable else ".pin_memory() where the tensor is made"
        write = f"{pinned}, and .to(device, non_blocking=True)"
        edits = *_set(pageable, "pin_memory", "True"), Edit(first, "keyword", ("non_blocking", "True"))
        why = "where its tensor is made, the line does not say"
        yield Candidate("no-waits", Kind.FAULT, place_of(first), what, write, edits if pageable else why)
        return
    called = first.get("called")
    by = f", called by {place_of(called)}" if called else ""
    what = f"the CPU waits for the GPU in every step{by}{others}"
    write = _seldom((called or first)["text"])
    do = "without" if write.startswith("without: ") else "detached" if ".detach()" in write else "seldom"
    changed: tuple[Edit, ...] | str = _each([called or first], do, *([_EVERY] if do == "seldom" else []))
    if write.startswith(("without what", "only every")):
        changed = "what the line computes is needed in every step"
    yield Candidate("no-waits", Kind.FAULT, place_of(first), what, write, changed)


def _seldom(text: str) -> str:
    """Return the line to write instead of one that waits."""
    if any(call in text for call in _NEEDLESS):
        return f"without: {text}"
    if found := re.fullmatch(r"(if|elif|while) (.+?):(.*)", text):
        return f"{found[1]} step % {_EVERY} == 0 and ({found[2]}):{found[3]}"
    if _TRAINS.search(text) and not _ASSIGNS.match(text):
        return f"without what waits in it: {text}"
    if _ASSIGNS.match(text) or ".append(" in text:  # what is kept, or done beside it, is needed of each step
        kept = _READS.sub(".detach()", text)
        kept = re.sub(r"\bfloat\(([\w.]+)\)", r"\1.detach()", kept).replace(".detach().detach()", ".detach()")
        if kept != text:
            return f"{kept}, and read it every {_EVERY} steps"
        if _TRAINS.search(text):
            return f"without what waits in it: {text}"
    if text.startswith(("for ", "with ", "return ", "assert ", "else")) or not text:
        return f"only every {_EVERY} steps: {text}"
    return f"if step % {_EVERY} == 0: {text}"


def _units(seen: _Seen, result: _Seen) -> Iterator[Candidate]:
    model, calls = seen["model"], seen["sharding"]
    blocks = model.get("blocks")
    if not calls:
        return
    last, is_fsdp1 = calls[-1], _is_fsdp1(calls[-1])
    place, path = place_of(last), (blocks or {}).get("path", "")
    if model.get("unwrapped_root"):
        count = model["unsharded_parameters"]
        write = "model = FullyShardedDataParallel(model, ...)" if is_fsdp1 else "fully_shard(model, ...)"
        yield Candidate(
            NOT_SIMULATED if is_fsdp1 else "wrap-root",
            Kind.WRONG if count else Kind.FAULT,
            place,
            f"the model around the units is not wrapped: {count:,} parameters are neither sharded nor "
            "reduced over the ranks, and each unit gathers by itself",
            f"after that line, for the whole model: {write}",
            "the model is not named at that line" if is_fsdp1 else (Edit(last, "around", (path,)),),
        )
        return
    classes = model.get("unit_classes", {})
    together = max(call.get("together", 1) for call in calls)
    fine = blocks and classes.get(blocks["class"], 0) == blocks["count"] and len(classes) == 1
    if not blocks or (fine and together <= _PAIR):
        return
    alone = model["units"] <= 1
    what = f"its {model['units']} units ({', '.join(classes)}) are other than its {blocks['count']} blocks"
    if alone:
        what = "the whole model is one unit: nothing can be gathered beside computation"
    if together > _PAIR:
        what = f"{together} blocks are one unit: no collective is done beside the work of another block"
    root = re.search(r"fully_shard\((\w+)", last["text"])
    write = f"before it: for block in {root[1] if root else 'model'}.{path}: fully_shard(block)"
    edits = (*_each(calls[:-1], "without"), Edit(last, "before", (f"for block in {{0}}.{path}: {{like}}",)))
    if is_fsdp1:
        write = f"auto_wrap_policy=ModuleWrapPolicy({{{blocks['class']}}})"
        policy = f"ModuleWrapPolicy({{type(next({{0}}.{path}.children()))}})"
        edits = _set([last], "auto_wrap_policy", policy)
        edits += (Edit(last, "imports", ("from torch.distributed.fsdp.wrap import ModuleWrapPolicy",)),)
    yield Candidate("wrap-blocks", Kind.FAULT if alone else Kind.MISTAKE, place, what, write, edits)


def _checkpointing(seen: _Seen, result: _Seen) -> Iterator[Candidate]:
    found, place = seen["checkpointing"], place_of(seen["checkpointing"] or {})
    if found is not None:
        what, write = "memory allows to recompute nothing", f"without: {found['text']}"
        edits = (Edit(found, "bare", (_OF_CHECKPOINT,)),)
        yield Candidate("no-checkpoint", Kind.MISTAKE, place, what, write, edits)
        what, write = "memory allows to recompute every other block only", "recompute every other block"
        edits = (Edit(found, "bare", (_OF_CHECKPOINT, 2)),)
        yield Candidate("half-checkpoint", Kind.MISTAKE, place, what, write, edits)
    elif seen["sharding"] and result.get("alloc_retries_per_step"):
        leaves = _leaves(seen)
        forward = "{0}.forward = functools.partial(checkpoint, {0}.forward, use_reentrant=False)"
        imports = ("import functools", "from torch.utils.checkpoint import checkpoint")
        yield Candidate(
            "checkpoint",
            Kind.FREE,
            place_of(seen["sharding"][0]),
            "memory is full (allocator retries); recompute the blocks",
            "before each block is wrapped: block = checkpoint_wrapper(block)",
            _each(leaves, "before", forward) + tuple(Edit(leaves[0], "imports", (each,)) for each in imports),
        )


def _leaves(seen: _Seen) -> list[_Seen]:
    """Return the calls that wrap a part of the model, of one that is wrapped in several."""
    calls = seen["sharding"]
    return list(calls[:-1] if len(calls) > 1 else calls)


def _sharding(seen: _Seen, result: _Seen) -> Iterator[Candidate]:
    calls = seen["sharding"]
    if not calls:
        return
    call = calls[0]
    given, place, is_fsdp1 = call["arguments"], place_of(call), _is_fsdp1(call)
    strategy = given.get("sharding_strategy") or "FULL_SHARD"
    if offloaded := [each for each in calls if each["arguments"]["offload"]]:
        offload = "cpu_offload" if is_fsdp1 else "offload_policy"
        edits = (*_each(offloaded, "drop", offload), Edit(offloaded[0], "made_on_device"))
        what = "memory allows to keep the shards on the GPU"
        yield Candidate(
            "no-offload", Kind.MISTAKE, place_of(offloaded[0]), what, f"without {offload}=", edits
        )
    kept = [each for each in calls if each["arguments"].get("reshard_after_forward") is False]
    kept = calls if strategy == "SHARD_GRAD_OP" else kept
    name, value = _written("reshard" if kept else "keep", is_fsdp1=is_fsdp1)
    needed = "ShardingStrategy" if is_fsdp1 else ""
    if kept and result.get("alloc_retries_per_step"):
        what, edits = "memory is full: free parameters after forward", _set(kept, name, value, needed)
        yield Candidate("reshard", Kind.FREE, place_of(kept[0]), what, f"{name}={value}", edits)
    elif not kept and strategy == "FULL_SHARD" and seen["model"].get("units", 0) > 1:
        what = "memory allows to keep parameters from forward to backward"
        write, edits = f"{name}={value}", _set(calls, name, value, needed)
        yield Candidate("keep", Kind.FREE, place, what, write, edits)
    yield from _hybrid(calls, result["config"], strategy)
    yield from _gathered_types(seen, place, is_fsdp1=is_fsdp1)


def _hybrid(calls: Sequence[_Seen], config: _Seen, strategy: str) -> Iterator[Candidate]:
    each, is_fsdp1 = config.get("gpus_used_per_node") or config["gpus_per_node"], _is_fsdp1(calls[0])
    nodes = config["gpus"] // each
    if (
        nodes < 2
        or config["gpus"] % each
        or calls[0]["arguments"]["mesh"] not in (None, 1)
        or strategy != "FULL_SHARD"
    ):
        return
    mesh = f'init_device_mesh("cuda", ({nodes}, {each}), mesh_dim_names=("replicate", "shard"))'
    more = "sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=" if is_fsdp1 else "mesh="
    edits = (
        Edit(calls[0], "first", (f"hybrid_mesh = {mesh}", [call.get("span") for call in calls])),
        *_set(calls, "device_mesh" if is_fsdp1 else "mesh", "hybrid_mesh"),
        Edit(calls[0], "imports", ("from torch.distributed.device_mesh import init_device_mesh",)),
    )
    if is_fsdp1:
        edits += _set(calls, "sharding_strategy", "ShardingStrategy.HYBRID_SHARD", "ShardingStrategy")
    what = "shard inside of a node, replicate over nodes"
    yield Candidate("hybrid", Kind.FREE, place_of(calls[0]), what, more + mesh, edits)


def _gathered_types(seen: _Seen, place: str, *, is_fsdp1: bool) -> Iterator[Candidate]:
    calls = seen["sharding"]
    if calls[0]["arguments"].get("param_dtype") not in (None, "None", "torch.float32"):
        return
    if seen["computes_in"] == "fp32":
        what = "it computes in fp32; in bf16 rounding changes"
    elif seen["computes_in"] in ("bf16", "fp16") and seen["model"].get("dtype") == "torch.float32":
        what = (
            f"it gathers fp32 parameters and computes in {seen['computes_in']}: twice the bytes, and a cast"
        )
    else:
        return
    name, policy = _written("bf16", is_fsdp1=is_fsdp1)
    edits = (
        *_set(calls, name, policy, policy.partition("(")[0]),
        Edit(calls[0], "imports", ("import torch",)),
    )
    yield Candidate("bf16", Kind.MISTAKE, place, what, f"{name}={policy}", edits)


def _prefetch(seen: _Seen, result: _Seen) -> Iterator[Candidate]:
    calls, model = seen["sharding"], seen["model"]
    if not calls:
        return
    call, place, is_fsdp1 = calls[-1], place_of(calls[-1]), _is_fsdp1(calls[-1])
    given, blocks = call["arguments"], model.get("blocks")
    of_blocks = bool(blocks) and model["unit_classes"] == {blocks["class"]: blocks["count"]}
    of_blocks &= call["count"] == 1 and not model.get("unwrapped_root")
    if given.get("forward_prefetch") or seen["forward_prefetch"]:
        asked = seen["forward_prefetch"] or call
        left = _each([asked], *(("drop", "forward_prefetch") if asked is call else ("without",)))
        yield Candidate(
            "no-forward-prefetch", Kind.NO_EFFECT, place_of(asked), "forward prefetch", "leave it out", left
        )
    elif model.get("units", 0) > 1:
        late = given.get("backward_prefetch", "BACKWARD_PRE")
        name, value = _written("backward-prefetch", is_fsdp1=True)
        early = _set([call], name, value, "BackwardPrefetch")
        if is_fsdp1 and late != "BACKWARD_PRE":
            write = f"{name}={value}"
            what = f"backward prefetches the next unit late ({late})"
            what = what if late else "backward does not prefetch the next unit"
            yield Candidate("backward-prefetch", Kind.MISTAKE, place, what, write, early)
        edits: tuple[Edit, ...] | str = "the order of the units is not written in the script"
        write = varied("prefetch").fsdp2
        if is_fsdp1:
            name, value = _written("prefetch", is_fsdp1=True)
            write, edits = f"{name}={value}", _set([call], name, value)
            edits += early if late != "BACKWARD_PRE" else ()
        elif of_blocks:
            text = write.replace("blocks", f"{{0}}.{blocks['path']}")
            edits = Edit(call, "after", (text,)), Edit(call, "imports", ("from itertools import pairwise",))
        yield Candidate("prefetch", Kind.FREE, place, "prefetch the next unit", write, edits)
    if is_fsdp1 and given.get("limit_all_gathers") is False:
        what, left = "limit the all-gathers in flight", _each([call], "drop", "limit_all_gathers")
        yield Candidate("limit", Kind.MISTAKE, place, what, "without limit_all_gathers=False", left)
        yield Candidate("limit", Kind.NO_EFFECT, place, "limit_all_gathers=False", "leave it out", left)
    if not is_fsdp1 and blocks and model["unit_classes"].get(blocks["class"]) == blocks["count"]:
        yield Candidate(
            "wrap-pairs",
            Kind.FREE,
            place_of(calls[0]),
            "units of two blocks: fewer, larger collectives",
            varied("wrap-pairs").fsdp2,
            (Edit(calls[0], "pairs"),),
        )


def _choices(seen: _Seen, result: _Seen) -> Iterator[Candidate]:
    for made in seen["optimizers"][:1]:
        if made["has_fused"] and not made["fused"]:
            edits = (Edit(made, "drop", ("foreach", False)), *_set([made], "fused", "True"))
            what = "the optimizer is not fused"
            yield Candidate("fused", Kind.MISTAKE, place_of(made), what, "fused=True", edits, worth=0.01)
    batch, loaders = seen["batch"], seen["loaders"]
    what = "memory allows twice the batch; the optimization changes with it"
    if batch is not None:
        write, why = f"{batch['option']} {2 * batch['value']}", "it is an argument of the command line"
        yield Candidate("double-batch", Kind.CHOICE, "", what, write, why, changes_work=True)
    elif loaders and loaders[0]["batch_size"]:
        write, edits = (
            f"batch_size={2 * loaders[0]['batch_size']}",
            (Edit(loaders[0], "doubled", ("batch_size",)),),
        )
        yield Candidate(
            "double-batch", Kind.CHOICE, place_of(loaders[0]), what, write, edits, changes_work=True
        )
    if seen["sharding"] and not result.get("compiled"):
        yield Candidate(
            "compile",
            Kind.CHOICE,
            place_of(seen["sharding"][0]),
            "compile each block: the first step takes longer",
            varied("compile").fsdp2,
            _each(_leaves(seen), "before", "{0}.compile()"),
        )


_Rule = Callable[[_Seen, _Seen], Iterator[Candidate]]
_RULES: tuple[_Rule, ...] = (
    gradients, habits, _waits, _units, _checkpointing, _sharding, _prefetch, _choices,
)  # fmt: skip
