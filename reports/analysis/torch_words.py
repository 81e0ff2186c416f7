"""The settings that a verdict names, as torch's FSDPs call them: for traces of programs that are not ours."""

from __future__ import annotations

from collections.abc import Iterator

from fsdpbench.reports.analysis.measures.findings import Suggestion, Verdict

# By setting, and by value where that matters: fully_shard (FSDP2), then FullyShardedDataParallel (FSDP1).
_WORDS: dict[tuple[str, str | None], str] = {
    ("backward_prefetch", None): (
        "FullyShardedDataParallel(..., backward_prefetch=BackwardPrefetch.BACKWARD_PRE); fully_shard "
        "prefetches in backward by itself, module.set_modules_to_backward_prefetch([...]) says what"
    ),
    ("backward_prefetch_depth", None): (
        "layer.set_modules_to_backward_prefetch([the two layers before it]) (fully_shard)"
    ),
    ("forward_prefetch", None): (
        "layer.set_modules_to_forward_prefetch([next_layer]) (fully_shard), or "
        "FullyShardedDataParallel(..., forward_prefetch=True)"
    ),
    ("limit_all_gathers", None): (
        "FullyShardedDataParallel(..., limit_all_gathers=...) takes True (two in flight) or False; "
        "fully_shard has no limiter"
    ),
    (
        "memory_handover",
        "events",
    ): "fully_shard instead of FullyShardedDataParallel: it needs no record_stream",
    ("batch", None): "a larger batch on each GPU (DataLoader(batch_size=...))",
    ("wrap", "block"): (
        "for block in model.layers: fully_shard(block), then fully_shard(model); or "
        "FullyShardedDataParallel(..., auto_wrap_policy=ModuleWrapPolicy({Block}))"
    ),
    ("wrap", None): "fully_shard([layers[0], layers[1]]): several blocks as one group",
    ("reshard_after_forward", "false"): (
        "fully_shard(module, reshard_after_forward=False), or ShardingStrategy.SHARD_GRAD_OP"
    ),
    ("param_dtype", None): (
        "mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16) (fully_shard), or "
        "mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)"
    ),
    ("reduce_dtype", None): (
        "mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16) (fully_shard), or "
        "mixed_precision=MixedPrecision(reduce_dtype=torch.bfloat16)"
    ),
    ("activation_checkpointing", None): (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.apply_activation_checkpointing(model)"
    ),
    ("compile", None): "torch.compile(model)",
    ("cpu_offload", None): (
        "without offload_policy=CPUOffloadPolicy() (fully_shard), or without cpu_offload=CPUOffload(...)"
    ),
}


def torch_words(suggestion: Suggestion) -> str | None:
    """What to write in a program that uses torch; None where torch has no word for it."""
    return _WORDS.get((suggestion.setting, suggestion.value)) or _WORDS.get((suggestion.setting, None))


def in_torch(verdict: Verdict) -> Iterator[str]:
    """Everything that a verdict suggests, in torch's words, the most costly cause first, each once."""
    suggestions = (each for finding in verdict.findings for each in finding.suggestions)
    yield from dict.fromkeys(words for each in suggestions if (words := torch_words(each)))
