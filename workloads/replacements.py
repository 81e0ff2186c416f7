"""Parts of other software's models, with which a software profile temporarily replaces the bench's own.

* llm-foundry's GPT (0.1.0 and 0.4.0): the loss is flash-attn's fused one (`loss_fn: fused_crossentropy`), one
  pass over the logits in forward and one in backward, without log-probabilities in memory. `attn_impl: flash`
  packs queries, keys and values by the padding mask before the kernel and unpacks its output (`flash_attn_fn`
  in `layers/attention.py`, `bert_padding.py` of flash-attn), even without padding. Finding the positions
  (`nonzero`) and the longest sequence (`.item()`) blocks the CPU, six times per layer.
* fms-acceleration's Llamas: Triton kernels (of unsloth) rotate queries and keys in place, in one pass
  forward and one backward.
* torch 1.13 used the reentrant form of activation checkpointing by default (`utils/checkpoint.py`), which
  recomputes a block to its end. It had no RMSNorm: models composed it of operators.

Simulated tensors have no values: a fused kernel is replaced by reads and writes of exactly the same bytes.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fsdpbench.base.torch_internals import replaced
from fsdpbench.workloads import blocks, layers, rotations
from fsdpbench.workloads.families import gpt

_ATTEND = gpt.GPTAttention.attend


def fused_cross_entropy(logits: Tensor, targets: Tensor, in_fp32: bool) -> Tensor:
    """Read and write `logits` ([batch, length, vocab]) like the fused loss; return a scalar."""
    loss: Tensor = _FusedCrossEntropy.apply(logits.flatten(0, 1))
    return loss


class _FusedCrossEntropy(torch.autograd.Function):
    """One pass over the logits in each direction."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return rows.amax(1).float().mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (rows,) = ctx.saved_tensors
        result: Tensor = rows * gradient
        return result


def unpadded(attention: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Compute a GPT's attention over packed [batch, heads, length, size], with the copies and CPU waits of
    packing the inputs and unpacking the output."""
    batch, heads, length, size = query.shape
    mask = torch.ones(batch * length, dtype=torch.bool, device=query.device)
    packed = []
    for tensor in (query, key, value):
        places = torch.arange(batch * length, device=query.device)
        for _wait in ("nonzero", "longest"):
            mask.any().item()
        rows = tensor.transpose(1, 2).reshape(batch * length, heads * size)
        packed.append(_Unpad.apply(rows, places).view(batch, length, heads, size).transpose(1, 2))
    mixed = _ATTEND(attention, *packed).transpose(1, 2).reshape(batch * length, heads * size)
    padded: Tensor = _Pad.apply(mixed, places)
    return padded.view(batch, length, heads, size).transpose(1, 2)


class _Unpad(torch.autograd.Function):
    """The rows at `places`. Backward writes them into zeros, like flash-attn's `index_first_axis`: each row
    occurs once, so nothing is added."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return rows.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        return torch.zeros_like(gradient).index_copy_(0, places, gradient), None


class _Pad(torch.autograd.Function):
    """Zeros with rows written at `places`; backward reads them from there."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return torch.zeros_like(rows).index_copy_(0, places, rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        return gradient.index_select(0, places), None


def turn_in_one_pass(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Read and write `x` once each, like the fused rotary kernel."""
    result: Tensor = _OnePass.apply(x)
    return result


class _OnePass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return -x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


def reentrant(function: Any, *args: Any, **options: Any) -> Any:
    """Call torch's `checkpoint` in its reentrant form, the former default."""
    return checkpoint(
        function, *args, use_reentrant=True, preserve_rng_state=options.get("preserve_rng_state", True)
    )


_ONE_PASS = {"halves": rotations.Rotation(rotations.rotary_tables, turn_in_one_pass)}
MECHANISMS: Mapping[str, Callable[[], AbstractContextManager[None]]] = {
    "checkpointing.reentrant": partial(replaced, blocks, checkpoint=reentrant),
    "operators.composed_rms_norm": partial(replaced, torch.nn.functional, rms_norm=layers.composed_rms_norm),
    "operators.fused_rotary": partial(replaced, rotations, ROTATIONS={**rotations.ROTATIONS, **_ONE_PASS}),
    "attention.unpads": partial(replaced, gpt.GPTAttention, attend=unpadded),
    "trainer.fused_loss": partial(replaced, gpt, token_loss=fused_cross_entropy),
}
"""By key of a software profile: a context manager that replaces a part of the models."""
