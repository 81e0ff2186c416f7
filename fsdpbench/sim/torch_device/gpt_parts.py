"""Parts of llm-foundry's GPT in the bench's own; read from the sources of llm-foundry 0.1.0 and 0.4.0.

* The loss is flash-attn's fused one (`loss_fn: fused_crossentropy`): one pass over the logits forward and one
  backward, no log-probabilities in memory.
* `attn_impl: flash` packs queries, keys and values by the padding mask before the kernel and unpacks its
  output (`flash_attn_fn` in `layers/attention.py`, `bert_padding.py` of flash-attn), also where nothing is
  padded. Finding the places (`nonzero`) and the longest sequence (`.item()`) makes the CPU wait, six times
  a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fsdpbench.torch_internals import replaced

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def fused_loss() -> AbstractContextManager[None]:
    """GPTs take the fused loss."""
    from fsdpbench.workloads.families import gpt

    return replaced(gpt, token_loss=fused_cross_entropy)


def unpadded_attention() -> AbstractContextManager[None]:
    """GPTs pack what goes into attention, and unpack what comes out."""
    from fsdpbench.workloads.families import gpt

    original = gpt.GPTAttention.attend

    def attend(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return unpadded(partial(original, self), query, key, value)

    return replaced(gpt.GPTAttention, attend=attend)


def fused_cross_entropy(logits: Tensor, targets: Tensor, in_fp32: bool) -> Tensor:
    """The loss of `logits`, instead of the workload's own."""
    loss: Tensor = _FusedCrossEntropy.apply(logits.flatten(0, 1))
    return loss


class _FusedCrossEntropy(torch.autograd.Function):
    """What the fused loss reads and writes; a simulated tensor holds no numbers to compute it from."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return rows.amax(1).float().mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (rows,) = ctx.saved_tensors
        result: Tensor = rows * gradient
        return result


def unpadded(attend: Attend, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """`attend` over packed [batch, heads, length, size]: what packing copies, and where it waits."""
    batch, heads, length, size = query.shape
    mask = torch.ones(batch * length, dtype=torch.bool, device=query.device)
    packed = []
    for tensor in (query, key, value):
        places = torch.arange(batch * length, device=query.device)
        for _wait in ("nonzero", "longest"):
            mask.any().item()
        rows = tensor.transpose(1, 2).reshape(batch * length, heads * size)
        packed.append(rows.index_select(0, places).view(batch, length, heads, size).transpose(1, 2))
    mixed = attend(*packed).transpose(1, 2).reshape(batch * length, heads * size)
    padded: Tensor = _Pad.apply(mixed, places)
    return padded.view(batch, length, heads, size).transpose(1, 2)


class _Pad(torch.autograd.Function):
    """Rows put at `places` of zeros; its backward takes them from there."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return torch.zeros_like(rows).index_copy_(0, places, rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        return gradient.index_select(0, places), None
