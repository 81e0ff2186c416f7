"""The trades between neighbouring values of a setting, and how a script writes them."""

from __future__ import annotations

from typing import Any

from fsdpbench.settings.setting import LESS, Trade, saves, speeds, wins

_BF16 = "param_dtype=torch.bfloat16, reduce_dtype=torch.float32"


def _is_coarse(wrap: Any) -> bool:
    """Whether units are larger than a block."""
    return isinstance(wrap, str) and (wrap == "root" or wrap.startswith(("every-", "size:")))


def _is_partial(checkpointing: Any) -> bool:
    """Whether something is not recomputed."""
    return bool(checkpointing != "full")


BATCH = (
    speeds(
        None,
        "more work for each byte that is sent and each kernel that is launched",
        risk="the optimization changes with it",
        fsdp2="DataLoader(batch_size=...): a larger batch on each GPU",
        against=("cpu_late", "queued", "transfer", "exposed_reduction", "cpu_bound"),
        shown="more",
    ),
    saves(
        None,
        "half the activations",
        risk="accumulate gradients to keep the samples a step",
        fsdp2="DataLoader(..., batch_size=half of it)",
        shown="half",
        variation="half-batch",
    ),
)

STRATEGY = (
    saves(
        "FULL_SHARD",
        "shards parameters too, over all ranks",
        of=("SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"),
        also=(("shard_size", None),),
    ),
)

WRAP = (
    saves(
        "block",
        "smaller units: less is gathered at a time",
        of=_is_coarse,
        fsdp2="for block in blocks: fully_shard(block), then fully_shard(model)",
        fsdp1="auto_wrap_policy=ModuleWrapPolicy({Block})",
        variation="wrap-blocks",
        against=("first_of_step", "root_only"),
    ),
    speeds(
        "every-2",
        "fewer, larger collectives",
        fsdp2="for a, b in zip(blocks[::2], blocks[1::2]): fully_shard([a, b])",
        variation="wrap-pairs",
        against=("cpu_late", "cpu_bound"),
    ),
)

RESHARD_AFTER_FORWARD = (
    saves(
        True,
        "frees a unit's parameters after its forward",
        of=(False,),
        fsdp2="reshard_after_forward=True",
        fsdp1="sharding_strategy=ShardingStrategy.FULL_SHARD",
        variation="reshard",
    ),
    speeds(
        False,
        "keeps parameters from forward to backward: one all-gather less",
        fsdp2="reshard_after_forward=False",
        fsdp1="sharding_strategy=ShardingStrategy.SHARD_GRAD_OP",
        variation="keep",
        against=("transfer",),
    ),
)

BACKWARD_PREFETCH = (
    saves(
        "none",
        "one unit less is gathered in backward",
        of=("pre", "post"),
    ),
    speeds(
        "pre",
        "gathers the next unit beside the backward of this one",
        fsdp2="module.set_modules_to_backward_prefetch([...]), where its own order is not enough",
        fsdp1="backward_prefetch=BackwardPrefetch.BACKWARD_PRE",
        variation="backward-prefetch",
        against=("no_prefetch_backward",),
    ),
)

BACKWARD_PREFETCH_DEPTH = (
    speeds(
        2,
        "gathers further ahead in backward",
        fsdp2="layer.set_modules_to_backward_prefetch([the two layers before it]) (fully_shard)",
        against=("queued",),
    ),
)

FORWARD_PREFETCH = (
    saves(
        0,
        "one unit less is gathered in forward",
        of=bool,
    ),
    speeds(
        1,
        "gathers the next unit beside the forward of this one",
        fsdp2="for a, b in pairwise(blocks): a.set_modules_to_forward_prefetch([b])",
        fsdp1="forward_prefetch=True",
        variation="prefetch",
        against=("no_prefetch", "cpu_late"),
    ),
)

LIMIT_ALL_GATHERS = (
    saves(
        2,
        "two units' buffers at a time",
        of=("off", "auto"),
        fsdp1="limit_all_gathers=True",
        against=("alloc_retries",),
    ),
    speeds(
        4,
        "more all-gathers in flight",
        fsdp1="limit_all_gathers=False (True: two in flight); fully_shard has no limiter",
        against=("rate_limiter",),
    ),
    speeds(
        "off",
        "no wait for memory of earlier all-gathers",
        fsdp1="limit_all_gathers=False",
        against=("event",),
    ),
)

MEMORY_HANDOVER = (
    wins(
        "events",
        "hands memory over as soon as it was read",
        fsdp2="fully_shard instead of FullyShardedDataParallel: it needs no record_stream",
        against=("rate_limiter", "event", "alloc_retries"),
    ),
)

PARAM_DTYPE = (
    wins(
        "bf16",
        "halves activations",
        of=("fp32",),
        risk="computes in bf16",
        fsdp2=f"mp_policy=MixedPrecisionPolicy({_BF16})",
        fsdp1=f"mixed_precision=MixedPrecision({_BF16})",
        variation="bf16",
        against=("transfer",),
    ),
)

REDUCE_DTYPE = (
    wins(
        "bf16",
        "halves reduction buffers",
        of=("fp32",),
        risk="changes the sums' rounding",
        fsdp2="mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)",
        fsdp1="mixed_precision=MixedPrecision(reduce_dtype=torch.bfloat16)",
        against=("exposed_reduction",),
    ),
)

ACTIVATION_CHECKPOINTING = (
    saves(
        "every-2",
        "recomputes every other block",
        of=("none",),
    ),
    saves(
        "op",
        "keeps products and attention, recomputes the rest",
        of=("none",),
    ),
    saves(
        "full",
        "recomputes every block",
        of=_is_partial,
        fsdp2="before each block is wrapped: block.forward = functools.partial(checkpoint, "
        "block.forward, use_reentrant=False)",
        variation="checkpoint",
        against=("alloc_retries",),
    ),
)

ACTIVATION_OFFLOAD = (
    saves(
        True,
        "what units save for backward waits on the host",
        of=(False,),
    ),
)

CPU_OFFLOAD = (
    saves(
        True,
        "shards, gradients and optimizer live on the host",
        of=(False,),
    ),
    speeds(
        False,
        "keeps the shards on the GPU",
        fsdp2="without offload_policy=CPUOffloadPolicy()",
        fsdp1="without cpu_offload=CPUOffload(...)",
        variation="no-offload",
        against=("memory_copies",),
    ),
)

OPTIMIZER = (
    wins(
        "adamw",
        "fused: no temporaries in the optimizer's step",
        of=("adamw-foreach", "adamw-loop"),
        fsdp2="the optimizer's fused=True",
        variation="fused",
    ),
)

OPTIMIZER_DTYPE = (
    Trade(
        "bf16",
        "halves AdamW's moments",
        of=(None,),
        memory=LESS,
        risk="they are rounded stochastically",
    ),
)

ZERO_GRAD = (
    Trade(
        "release",
        "frees gradients between steps",
        of=("fill",),
        memory=LESS,
        fsdp2="zero_grad(set_to_none=True)",
        variation="none-grads",
    ),
)

TP = (
    speeds(
        None,
        "fewer ranks share a layer: less is exchanged inside of it",
        against=("exposed_between_layers",),
        shown="less",
    ),
)

COMPILE = (
    Trade(
        True,
        "fewer, larger kernels",
        time=LESS,
        risk="the first step takes longer",
        fsdp2="before each block is wrapped: block.compile()",
        variation="compile",
        against=("cpu_bound",),
    ),
)
