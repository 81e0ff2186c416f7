"""What could be changed in a script: read off what it was seen to do, before anything of it is simulated."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fsdpbench.advise.candidate import NOT_SIMULATED, Candidate, Kind, place_of
from fsdpbench.advise.habits import habits

_NEEDLESS = ("synchronize(", "empty_cache(", "barrier(")
"""Calls that a training step does not need."""
_TRAINS = re.compile(r"\.(?:backward|step|zero_grad|update)\(|clip_grad_(?:norm|value)_\(|\bmodel\(")
"""What trains: no advice may leave it out of a step."""
_ASSIGNS = re.compile(r"[\w.\[\]'\", ]+[-+*/|]?=(?!=)")
_READS = re.compile(r"\.item\(\)|\.cpu\(\)|\.tolist\(\)")
_PAIR = 2
_EVERY = 100
"""How often a script should log, in steps."""


def candidates(result: Mapping[str, Any]) -> list[Candidate]:
    """Of the result of a script's run, those that may help; the starving loader is another question."""
    seen: Mapping[str, Any] = (result.get("script") or {}).get("observed") or {}
    if not seen:
        return []
    return [candidate for rule in _RULES for candidate in rule(seen, result)]


def _waits(seen: Mapping[str, Any], result: Mapping[str, Any]) -> Iterator[Candidate]:
    norms = seen.get("norms") or {}  # another rule tells of these
    of_norms = (norms.get("file"), norms.get("line"))
    waits = [wait for wait in seen["waits"] if (wait["file"], wait["line"]) != of_norms]
    if seen.get("anomaly"):  # and of these
        waits = [wait for wait in waits if ".backward(" not in wait["text"]]
    if not waits:
        return
    first = waits[0]
    others = "".join(f" (also {place_of(each)})" for each in waits[1:2])
    if first["copies"]:
        useless = "; non_blocking=True has no effect on it" if "non_blocking=True" in first["text"] else ""
        what = f"every step copies from memory that is not pinned, and the CPU waits for it{useless}"
        write = "pin_memory=True in the DataLoader, and .to(device, non_blocking=True)"
    else:
        called = first.get("called")
        by = f", called by {place_of(called)}" if called else ""
        what = f"the CPU waits for the GPU in every step{by}{others}"
        write = _seldom((called or first)["text"])
    yield Candidate("no-waits", Kind.FAULT, place_of(first), what, write)


def _seldom(text: str) -> str:
    """What to write instead of a line that waits."""
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


def _root(seen: Mapping[str, Any], result: Mapping[str, Any]) -> Iterator[Candidate]:
    model, calls = seen["model"], seen["sharding"]
    if not model.get("unwrapped_root"):
        return
    count, is_fsdp1 = model["unsharded_parameters"], calls[-1]["api"] != "fully_shard"
    write = "model = FullyShardedDataParallel(model, ...)" if is_fsdp1 else "fully_shard(model, ...)"
    yield Candidate(
        NOT_SIMULATED if is_fsdp1 else "wrap-root",
        Kind.WRONG if count else Kind.FAULT,
        place_of(calls[-1]),
        f"the model around the units is not wrapped: {count:,} parameters are neither sharded nor "
        "reduced over the ranks, and each unit gathers by itself",
        f"after that line, for the whole model: {write}",
    )


def _one_unit(seen: Mapping[str, Any], result: Mapping[str, Any]) -> Iterator[Candidate]:
    model, calls = seen["model"], seen["sharding"]
    blocks = model.get("blocks")
    if not calls or not blocks or model.get("unwrapped_root"):
        return
    classes = model["unit_classes"]
    together = max((call.get("together", 1) for call in calls), default=1)
    if classes.get(blocks["class"], 0) == blocks["count"] and len(classes) == 1 and together <= _PAIR:
        return
    alone = model["units"] <= 1
    what = "the whole model is one unit: nothing can be gathered beside computation" if alone else (
        f"its {model['units']} units ({', '.join(classes)}) are other than its {blocks['count']} blocks"
    )  # fmt: skip
    if together > _PAIR:
        what = f"{together} blocks are one unit: no collective is done beside the work of another block"
    root = re.search(r"fully_shard\((\w+)", calls[-1]["text"])
    name = root[1] if root else "model"
    if calls[-1]["api"] == "fully_shard":
        write = f"before it: for block in {name}.{blocks['path']}: fully_shard(block)"
    else:
        write = f"auto_wrap_policy=ModuleWrapPolicy({{{blocks['class']}}})"
    yield Candidate("wrap-blocks", Kind.FAULT if alone else Kind.MISTAKE, place_of(calls[-1]), what, write)


def _checkpointing(seen: Mapping[str, Any], result: Mapping[str, Any]) -> Iterator[Candidate]:
    found = seen["checkpointing"]
    if found is not None:
        place = place_of(found)
        yield Candidate(
            "no-checkpoint",
            Kind.MISTAKE,
            place,
            "memory allows to recompute nothing",
            f"without: {found['text']}",
        )
        yield Candidate(
            "half-checkpoint",
            Kind.MISTAKE,
            place,
            "memory allows to recompute every other block only",
            f"of every other block: {found['text']}",
        )
    elif seen["sharding"] and result.get("alloc_retries_per_step"):
        yield Candidate(
            "checkpoint",
            Kind.FREE,
            place_of(seen["sharding"][0]),
            "memory is full (allocator retries); recompute the blocks",
            "before each block is wrapped: block = checkpoint_wrapper(block)",
        )


def _sharding(seen: Mapping[str, Any], result: Mapping[str, Any]) -> Iterator[Candidate]:
    calls = seen["sharding"]
    if not calls:
        return
    call = calls[0]
    given = call["arguments"]
    place, is_fsdp1 = place_of(call), call["api"] != "fully_shard"
    strategy = given.get("sharding_strategy") or "FULL_SHARD"
    if given["offload"]:
        offload = "cpu_offload" if is_fsdp1 else "offload_policy"
        yield Candidate(
            "no-offload",
            Kind.MISTAKE,
            place,
            "memory allows to keep the shards on the GPU",
            f"without {offload}=",
        )
    kept = given.get("reshard_after_forward") is False or strategy == "SHARD_GRAD_OP"
    if kept and result.get("alloc_retries_per_step"):
        write = "ShardingStrategy.FULL_SHARD" if is_fsdp1 else "reshard_after_forward=True"
        yield Candidate("reshard", Kind.FREE, place, "memory is full: free parameters after forward", write)
    elif not kept and strategy == "FULL_SHARD" and seen["model"].get("units", 0) > 1:
        write = (
            "sharding_strategy=ShardingStrategy.SHARD_GRAD_OP" if is_fsdp1 else "reshard_after_forward=False"
        )
        yield Candidate(
            "keep", Kind.FREE, place, "memory allows to keep parameters from forward to backward", write
        )
    config = result["config"]
    ranks = config.get("gpus_used_per_node") or config["gpus_per_node"]
    nodes = config["gpus"] // ranks
    if nodes > 1 and config["gpus"] % ranks == 0 and given["mesh"] in (None, 1):
        sizes = f"({nodes}, {ranks})"
        mesh = f'init_device_mesh("cuda", {sizes}, mesh_dim_names=("replicate", "shard"))'
        more = "sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=" if is_fsdp1 else "mesh="
        if strategy == "FULL_SHARD":
            yield Candidate(
                "hybrid", Kind.FREE, place, "shard inside of a node, replicate over nodes", more + mesh
            )
    yield from _gathered_types(seen, place, is_fsdp1=is_fsdp1)


def _gathered_types(seen: Mapping[str, Any], place: str, *, is_fsdp1: bool) -> Iterator[Candidate]:
    given = seen["sharding"][0]["arguments"]
    if given.get("param_dtype") not in (None, "None", "torch.float32"):
        return
    if seen["computes_in"] == "fp32":
        what = "it computes in fp32; in bf16 rounding changes"
    elif seen["computes_in"] in ("bf16", "fp16") and seen["model"].get("dtype") == "torch.float32":
        what = (
            f"it gathers fp32 parameters and computes in {seen['computes_in']}: twice the bytes, and a cast"
        )
    else:
        return
    policy = "param_dtype=torch.bfloat16, reduce_dtype=torch.float32"
    kind = "mixed_precision=MixedPrecision" if is_fsdp1 else "mp_policy=MixedPrecisionPolicy"
    yield Candidate("bf16", Kind.MISTAKE, place, what, f"{kind}({policy})")


def _prefetch(seen: Mapping[str, Any], result: Mapping[str, Any]) -> Iterator[Candidate]:
    calls = seen["sharding"]
    if not calls:
        return
    call, units = calls[-1], seen["model"].get("units", 0)
    given = call["arguments"]
    is_fsdp1 = call["api"] != "fully_shard"
    if given.get("forward_prefetch") or seen["forward_prefetch"]:
        place = place_of(seen["forward_prefetch"] or call)
        yield Candidate("no-forward-prefetch", Kind.NO_EFFECT, place, "forward prefetch", "leave it out")
    elif units > 1:
        if is_fsdp1 and given.get("backward_prefetch", "BACKWARD_PRE") != "BACKWARD_PRE":
            write = "backward_prefetch=BackwardPrefetch.BACKWARD_PRE"
            what = "backward does not prefetch the next unit"
            yield Candidate("backward-prefetch", Kind.MISTAKE, place_of(call), what, write)
        write = (
            "for a, b in pairwise(blocks): a.set_modules_to_forward_prefetch([b])"
            if not is_fsdp1
            else "forward_prefetch=True"
        )
        yield Candidate("prefetch", Kind.FREE, place_of(call), "prefetch the next unit", write)
    if is_fsdp1 and given.get("limit_all_gathers") is False:
        yield Candidate(
            "limit", Kind.MISTAKE, place_of(call), "limit the all-gathers in flight", "limit_all_gathers=True"
        )
        yield Candidate("limit", Kind.NO_EFFECT, place_of(call), "limit_all_gathers=False", "leave it out")
    blocks = seen["model"].get("blocks")
    if not is_fsdp1 and blocks and seen["model"]["unit_classes"].get(blocks["class"]) == blocks["count"]:
        yield Candidate(
            "wrap-pairs",
            Kind.FREE,
            place_of(calls[0]),
            "units of two blocks: fewer, larger collectives",
            "for a, b in zip(blocks[::2], blocks[1::2]): fully_shard([a, b])",
        )


def _optimizer(seen: Mapping[str, Any], result: Mapping[str, Any]) -> Iterator[Candidate]:
    for made in seen["optimizers"][:1]:
        if made["has_fused"] and not made["fused"]:
            yield Candidate(
                "fused", Kind.MISTAKE, place_of(made), "the optimizer is not fused", "fused=True", worth=0.01
            )


def _choices(seen: Mapping[str, Any], result: Mapping[str, Any]) -> Iterator[Candidate]:
    batch, loaders = seen["batch"], seen["loaders"]
    told = "memory allows twice the batch; the optimization changes with it"
    if batch is not None:
        write = f"{batch['option']} {2 * batch['value']}"
        yield Candidate("double-batch", Kind.CHOICE, "", told, write, changes_work=True)
    elif loaders and loaders[0]["batch_size"]:
        write = f"batch_size={2 * loaders[0]['batch_size']}"
        yield Candidate("double-batch", Kind.CHOICE, place_of(loaders[0]), told, write, changes_work=True)
    if seen["sharding"] and not result.get("compiled"):
        yield Candidate(
            "compile",
            Kind.CHOICE,
            place_of(seen["sharding"][0]),
            "compile each block: the first step takes longer",
            "before each block is wrapped: block.compile()",
        )


_Rule = Callable[[Mapping[str, Any], Mapping[str, Any]], Iterator[Candidate]]
_RULES: tuple[_Rule, ...] = (
    habits, _waits, _root, _one_unit, _checkpointing, _sharding, _prefetch, _optimizer, _choices,
)  # fmt: skip
