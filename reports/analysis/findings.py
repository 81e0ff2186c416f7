"""Verdicts and their findings, and torch's words for the settings that they suggest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Outcome(StrEnum):
    """FOUND: something costs time that a setting may save.  FINE: nothing worth a setting.  CANNOT_TELL."""

    FOUND = "found"
    FINE = "fine"
    CANNOT_TELL = "cannot_tell"


@dataclass(frozen=True)
class Suggestion:
    """A setting to try next, by the bench's name for it, and its value."""

    setting: str
    value: str

    def to_dict(self) -> dict[str, str]:
        return {"setting": self.setting, "value": self.value}


@dataclass(frozen=True)
class Finding:
    """One rule that applied.

    cause: the rule's name.  share: part of the step that it costs (0 to 1).  gain: the most that the
    suggestions can save of the step (0 to 1), None where the trace does not tell.  text: a sentence.
    """

    cause: str
    share: float
    gain: float | None
    text: str
    suggestions: tuple[Suggestion, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "cause": self.cause,
            "share_of_step": self.share,
            "predicted_gain": self.gain,
            "text": self.text,
            "try": [suggestion.to_dict() for suggestion in self.suggestions],
        }


@dataclass(frozen=True)
class Verdict:
    """A sentence that says it all, and findings in order of what they cost."""

    outcome: Outcome
    sentence: str
    findings: tuple[Finding, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "outcome": str(self.outcome),
            "sentence": self.sentence,
            "findings": [finding.to_dict() for finding in self.findings],
        }


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
    """Return the code to write in a program that uses torch; None where torch has no such setting."""
    return _WORDS.get((suggestion.setting, suggestion.value)) or _WORDS.get((suggestion.setting, None))


def in_torch(verdict: Verdict) -> Iterator[str]:
    """Yield everything that a verdict suggests, in torch's words, the most costly cause first, each once."""
    suggestions = (each for finding in verdict.findings for each in finding.suggestions)
    yield from dict.fromkeys(words for each in suggestions if (words := torch_words(each)))
