"""Ring attention on CPU ranks: torch's own ring, which has no kernel for the CPU, over the CPU's kernel.

What goes around, how partial results are merged and what is left out of causal attention is torch's code; so
numbers on the CPU prove the plan that simulated GPUs run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from fsdpbench.torch_internals import replaced, ring_attention, ring_attention_backward

_SEQUENCE = 2
"""Dimension of [batch, heads, seq, width]."""
_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@contextmanager
def attention_by_ring(group: dist.ProcessGroup) -> Iterator[None]:
    """`F.scaled_dot_product_attention`, causal and without dropout, goes around the ranks of `group`."""

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        assert is_causal, "refused before"
        assert attn_mask is None, "refused before"
        assert not dropout_p, "refused before"
        if enable_gqa:
            key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        result: Tensor = _Ring.apply(query, key, value, group, scale)
        return result

    with replaced(F, scaled_dot_product_attention=attend):
        yield


class _Ring(torch.autograd.Function):
    """Attention of this rank's queries to the keys and values of all ranks; gradients come back around."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, group: Any, scale: float | None
    ) -> Tensor:
        out, logsumexp, *_ = ring_attention(
            group, _SEQUENCE, _forward, query=query, key=key, value=value, is_causal=True, scale=scale
        )
        ctx.save_for_backward(query, key, value, out, logsumexp)
        ctx.group, ctx.scale = group, scale
        result: Tensor = out
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, logsumexp = ctx.saved_tensors
        kept = {"query": query, "key": key, "value": value, "out": out, "logsumexp": logsumexp}
        gradients = ring_attention_backward(
            ctx.group, _SEQUENCE, _backward, grad_out=gradient, grad_out_name="grad_out", is_causal=True,
            scale=ctx.scale, **kept,
        )  # fmt: skip
        return (*gradients[:3], None, None)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float | None
) -> tuple[Tensor, ...]:
    result: tuple[Tensor, ...] = _FORWARD(query, key, value, 0.0, is_causal, scale=scale)
    return result


def _backward(
    *,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, ...]:
    result: tuple[Tensor, ...] = _BACKWARD(
        grad_out, query, key, value, out, logsumexp, 0.0, is_causal, scale=scale
    )
    return result
