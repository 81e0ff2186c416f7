"""Shapes of the results of operators that torch has for CUDA alone: those of `SyncBatchNorm`."""

from __future__ import annotations

import torch
from torch import Tensor


def _per_channel(x: Tensor) -> Tensor:
    """Statistics are kept in float32 at least."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty((x.shape[1],), dtype=dtype)


def _two(x: Tensor, *others: object) -> tuple[Tensor, Tensor]:
    """Mean and inverse standard deviation."""
    return _per_channel(x), _per_channel(x)


def _like_first(x: Tensor, *others: object) -> Tensor:
    return torch.empty_like(x)


def _backward_reduce(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sums for the input's gradient, and the gradients of weight and bias; an empty tensor for what is not
    wanted."""
    sums = [_per_channel(x) if input_g else x.new_empty((0,)) for _ in range(2)]
    dtype = x.dtype if weight is None else weight.dtype
    grads = [x.new_empty((x.shape[1] if wanted else 0,), dtype=dtype) for wanted in (weight_g, bias_g)]
    return sums[0], sums[1], grads[0], grads[1]


_RULES = {
    "batch_norm_stats": _two,
    "batch_norm_gather_stats_with_counts": _two,
    "batch_norm_elemt": _like_first,
    "batch_norm_backward_reduce": _backward_reduce,
    "batch_norm_backward_elemt": _like_first,
}


def register_shape_rules() -> torch.library.Library:
    """Give torch's meta device these rules; the library returned must be kept."""
    library = torch.library.Library("aten", "IMPL", "Meta")
    for name, rule in _RULES.items():
        library.impl(name, rule)
    return library
