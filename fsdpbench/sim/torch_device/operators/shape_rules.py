"""Shapes of results where torch has no rule: `SyncBatchNorm`'s and GRUs' operators, which it has for CUDA
alone, CTC's backward, `bincount` with `minlength`, and scaled products that are written into a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


def _gru_cell(
    input_gates: Tensor, hidden_gates: Tensor, hx: Tensor, *biases: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The new state, and what backward needs: three gates, the old state, the hidden part of the new one."""
    return torch.empty_like(hx), hx.new_empty((hx.shape[0], 5 * hx.shape[1]))


def _gru_cell_backward(grad: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Tensor, ...]:
    """Gradients of both kinds of gates, the old state, and both biases (empty without them)."""
    batch, gates = grad.shape[0], 3 * grad.shape[1]
    biases = [grad.new_empty((gates if has_bias else 0,)) for _ in range(2)]
    return grad.new_empty((batch, gates)), grad.new_empty((batch, gates)), torch.empty_like(grad), *biases


def _like_second(grad: Tensor, x: Tensor, *others: object) -> Tensor:
    return torch.empty_like(x)


def _bins(x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """`bincount`: as many bins as are asked for; that no value is beyond them is assumed."""
    if not minlength:
        raise NotImplementedError("bincount without minlength has as many bins as its largest value says")
    if weights is None:
        return x.new_empty((minlength,), dtype=torch.int64)
    return x.new_empty((minlength,), dtype=torch.float32 if weights.dtype is torch.float32 else torch.float64)


def _into(name: str) -> Callable[..., Tensor]:
    """The operator that writes into `out`, by the rule of the one that makes its result."""

    def rule(*args: Any, out: Tensor, **kwargs: Any) -> Tensor:
        made: Tensor = getattr(torch.ops.aten, name).default(*args, **kwargs)
        if out.dtype is not made.dtype:
            raise RuntimeError(f"{name}: out is {out.dtype}, and the result {made.dtype}")
        return out if out.shape == made.shape else out.resize_(made.shape)

    return rule


_RULES = {
    **{
        f"{name}.out": _into(name)
        for name in ("_scaled_mm", "_scaled_mm_v2")
        if hasattr(torch.ops.aten, name)
    },
    "bincount": _bins,
    "batch_norm_stats": _two,
    "batch_norm_gather_stats_with_counts": _two,
    "batch_norm_elemt": _like_first,
    "batch_norm_backward_reduce": _backward_reduce,
    "batch_norm_backward_elemt": _like_first,
    "_thnn_fused_gru_cell": _gru_cell,
    "_thnn_fused_gru_cell_backward": _gru_cell_backward,
    "_ctc_loss_backward": _like_second,
}


def register_shape_rules() -> torch.library.Library:
    """Give torch's meta device these rules; the library returned must be kept."""
    library = torch.library.Library("aten", "IMPL", "Meta")
    for name, rule in _RULES.items():
        library.impl(name, rule)
    return library
