"""What is seen of a side after an operation, and when two of those are equal; runs inside the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

Seen = dict[str, Any]
"""What was seen, by names that say what it is of."""


TOPICS = {
    "one rank": "FSDP is switching to use",
    "container": "containers that do not implement forward",
    "frozen beside trained": "has both parameters with requires_grad=True and False",
    "no gradients": "with no gradients -- returning the total norm",
    "copies": "offload_to_cpu=True and rank0_only=False",
}
"""Words of warnings of both sides, by what they are about."""


def topics_of(messages: list[str]) -> list[str]:
    return sorted({topic for topic, words in TOPICS.items() for text in messages if words in text})


@dataclass(frozen=True)
class Value:
    """A tensor as it was: what kind, and a copy of its elements."""

    kind: str
    shape: tuple[int, ...]
    dtype: str
    elements: torch.Tensor

    def __str__(self) -> str:
        flat = self.elements.flatten()
        shown = ", ".join(f"{x:.6g}" for x in flat[:6].tolist()) + (", ..." if flat.numel() > 6 else "")
        return f"{self.kind} {list(self.shape)} {self.dtype} [{shown}]"


def value_of(tensor: Any) -> Any:
    """What is kept of anything a side shows."""
    if isinstance(tensor, ShardedTensor):
        shards = tensor.local_shards()
        places = [(s.shard_offsets, s.shard_sizes) for s in tensor.metadata().shards_metadata]
        local = shards[0].tensor if shards else torch.empty(0)
        return Value(f"ShardedTensor {places}", tuple(tensor.size()), str(tensor.dtype), copied(local))
    if isinstance(tensor, DTensor):
        kind = f"DTensor {tensor.placements} local {list(tensor._local_tensor.shape)}"
        return Value(kind, tuple(tensor.shape), str(tensor.dtype), copied(tensor._local_tensor))
    if isinstance(tensor, torch.Tensor):
        return Value("tensor", tuple(tensor.shape), str(tensor.dtype), copied(tensor))
    return tensor


def copied(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if hasattr(tensor, "__tensor_flatten__"):
        tensor = tensor.inner
    if tensor.untyped_storage().size() == 0 and tensor.numel():
        return torch.full((1,), float("nan"))  # freed memory: nothing to see
    return tensor.clone().double()


def plain(name: str) -> str:
    """A parameter's name without its wrappers."""
    return name.replace("_fsdp_wrapped_module.", "").replace("_checkpoint_wrapped_module.", "")


def looked_at(model: nn.Module) -> Seen:
    """Parameters, gradients and buffers as the model shows them now."""
    seen: Seen = {"training": model.training}
    for name, parameter in model.named_parameters():
        name = plain(name)
        seen[f"parameter {name}"] = value_of(parameter)
        seen[f"requires_grad {name}"] = parameter.requires_grad
        seen[f"grad {name}"] = value_of(parameter.grad)
    for name, buffer in model.named_buffers():
        name = plain(name)
        seen[f"buffer {name}"] = value_of(buffer)
    return seen


@dataclass(frozen=True)
class Tolerance:
    """How far values may be from each other: ``relative`` to the largest element of the tensor, where that is
    not below ``floor`` (sums of elements that cancel are of the size of their rounding).
    """

    relative: float
    floor: float = 1e-3

    def equal(self, ours: Value, theirs: Value) -> bool:
        if (ours.kind, ours.shape, ours.dtype) != (theirs.kind, theirs.shape, theirs.dtype):
            return False
        a, b = ours.elements, theirs.elements
        if a.shape != b.shape:
            return False
        if not a.numel():
            return True
        scale = max(b.nan_to_num(0).abs().max().item(), self.floor)
        close = (a - b).abs() <= self.relative * scale
        return bool((close | (a == b) | (a.isnan() & b.isnan())).all())


def tolerance_for(dtypes: set[str], summands: int) -> Tolerance:
    """From the least precise dtype and the longest sum: every operation may round, sums in any order."""
    epsilon = max(torch.finfo(getattr(torch, name)).eps for name in dtypes)
    return Tolerance(epsilon * summands)


def differences(ours: Seen, theirs: Seen, tolerance: Tolerance) -> Iterator[tuple[str, Any, Any]]:
    """What differs: its name, and both values."""
    for name in [*theirs, *(name for name in ours if name not in theirs)]:
        a, b = ours.get(name, "missing"), theirs.get(name, "missing")
        if isinstance(a, Value) and isinstance(b, Value):
            if not tolerance.equal(a, b):
                yield name, a, b
        elif isinstance(a, float) and isinstance(b, float):
            if not (
                a == b
                or abs(a - b) <= tolerance.relative * max(abs(b), tolerance.floor)
                or (a != a and b != b)
            ):
                yield name, a, b
        elif type(a) is not type(b) or a != b:
            yield name, a, b
