"""Fused attention: priced by its shape, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fsdpbench.configuration.compute_type import compute_type
from fsdpbench.sim.costs import KernelCosts
from fsdpbench.sim.prices.call import Call, OperatorCost, Price, argument, tensor_bytes


def _attention_shape(query: torch.Tensor, key: torch.Tensor) -> tuple[int, int, int, int, int]:
    """(batch, heads, query length, key length, head size) of (batch, heads, length, size) tensors."""
    return query.shape[0], query.shape[1], query.shape[2], key.shape[2], query.shape[3]


def _bias_ns(args: Sequence[Any], bias_at: int | None, costs: KernelCosts) -> int:
    """Reading what is added to the scores, where the kernel takes such a thing."""
    bias = args[bias_at] if bias_at is not None and bias_at < len(args) else None
    return costs.memory_bound_ns(tensor_bytes(bias)) if isinstance(bias, torch.Tensor) else 0


def attention_forward(causal_at: int, bias_at: int | None = None) -> Price:
    """Fused attention's price. Argument ``causal_at`` says whether it is causal, ``bias_at`` is the bias."""

    def cost(call: Call, costs: KernelCosts) -> OperatorCost:
        args = call.args
        causal = bool(argument(call, causal_at, "is_causal", False))
        dtype = compute_type(args[0].dtype)
        shape, kv_heads = _attention_shape(args[0], args[1]), args[1].shape[1]
        duration = costs.attention_forward_ns(*shape, causal, dtype, kv_heads)
        return OperatorCost(f"flash_fwd_kernel_{dtype}", duration + _bias_ns(args, bias_at, costs))

    return cost


def attention_backward(causal_at: int, bias_at: int | None = None) -> Price:
    """The price of its backward, scratch memory included; the arguments as in forward."""

    def cost(call: Call, costs: KernelCosts) -> OperatorCost:
        args = call.args
        query, key = args[1], args[2]
        causal = bool(argument(call, causal_at, "is_causal", False))
        dtype = compute_type(query.dtype)
        shape = _attention_shape(query, key)
        duration = costs.attention_backward_ns(*shape, causal, dtype, key.shape[1])
        duration += _bias_ns(args, bias_at, costs)
        return OperatorCost(f"flash_bwd_kernel_{dtype}", duration, _backward_workspace(query, key))

    return cost


def _backward_workspace(query: torch.Tensor, key: torch.Tensor) -> tuple[int, ...]:
    """Scratch of flash attention's backward: row sums, the gradient of the queries in float32 (lengths
    rounded to 128, head size to 32), and expanded key and value gradients with grouped queries."""
    batch, heads, length, kv_length, size = _attention_shape(query, key)
    rounded = -(-length // 128) * 128
    wide = -(-size // 32) * 32 if size <= 192 else 256
    sizes = [batch * heads * rounded * 4, batch * heads * rounded * wide * 4]
    if key.shape[1] != heads:
        sizes += [batch * heads * kv_length * size * query.element_size()] * 2
    return tuple(sizes)
