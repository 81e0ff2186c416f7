"""The lm head and the loss together, a part of the tokens at a time, so that all logits are never held.

    hidden [rows, d_model] ──┬─ part 0 ── @ weight.T ── logits [rows / n, vocab] ── loss ─┐
                             ├─ part 1 ── ...                                             ├─ sum
                             └─ part n-1                                                  ┘

Logits of a large vocabulary are the largest activation of a language model: 8,192 tokens of 128,256 words are
2.1 GB in bf16, and their loss in fp32 holds twice that more than once. Here there are as many parts as the
vocabulary is wider than the model, so that a part's logits have as many elements as all of `hidden`: the rule
of Liger Kernel's fused linear cross entropy (Hsu et al. 2024, arXiv 2410.10989).

`chunked`: each part is checkpointed, its logits are computed again in backward. `fused`: forward computes the
gradient of each part's logits as soon as they are there, and from it those of hidden states and weight, which
backward only scales; nothing is computed twice. One backward only, as of `_LeanCrossEntropy`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fsdpbench.workloads.layers import token_loss

OfLogits = Callable[[Tensor], Tensor]


def chunked_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    in_fp32: bool,
    of_logits: OfLogits | None = None,
) -> Tensor:
    """Mean cross entropy of `hidden` [batch, seq, d_model] times `weight` [vocab, d_model], against int64
    `targets` [batch, seq]; logits are computed again in backward. `of_logits`: what follows the product."""
    rows, wanted = hidden.flatten(0, 1), targets.flatten()
    total: Tensor | None = None
    for part in _parts(len(rows), weight):
        loss = checkpoint(
            _loss_of_part, rows[part], weight, bias, wanted[part], in_fp32, of_logits,
            use_reentrant=False, preserve_rng_state=False,
        )  # fmt: skip
        share = loss * ((part.stop - part.start) / len(rows))
        total = share if total is None else total + share
    assert total is not None
    return total


def fused_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    in_fp32: bool,
    of_logits: OfLogits | None = None,
) -> Tensor:
    """As `chunked_loss`; gradients are computed in forward. `of_logits` has to be None: its gradient is
    unknown."""
    assert of_logits is None
    rows, wanted = hidden.flatten(0, 1), targets.flatten()
    loss: Tensor = _FusedLinearLoss.apply(rows, weight, bias, wanted, in_fp32)
    return loss


LINEAR_LOSSES = {"chunked": chunked_loss, "fused": fused_loss}


def _parts(rows: int, weight: Tensor) -> Iterator[slice]:
    """Slices of the rows, each a `vocab / d_model`-th of them."""
    vocab, width = weight.shape
    count = min(rows, -(-vocab // width))
    length = -(-rows // count)
    for start in range(0, rows, length):
        yield slice(start, min(start + length, rows))


def _loss_of_part(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    wanted: Tensor,
    in_fp32: bool,
    of_logits: OfLogits | None,
) -> Tensor:
    logits = F.linear(rows, weight, bias)
    if of_logits is not None:
        logits = of_logits(logits)
    return token_loss(logits[None], wanted[None], in_fp32)


class _FusedLinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, wanted: Tensor, in_fp32: bool
    ) -> Tensor:
        of_rows, of_weight, of_bias = ctx.needs_input_grad[:3]
        rows_grad = torch.empty_like(rows) if of_rows else None
        weight_grad = torch.zeros_like(weight) if of_weight else None
        bias_grad = torch.zeros_like(bias) if bias is not None and of_bias else None
        total = rows.new_zeros((), dtype=torch.promote_types(rows.dtype, torch.float32))
        for part in _parts(len(rows), weight):
            loss, gradient = _loss_and_gradient(rows[part], weight, bias, wanted[part], in_fp32)
            total += loss
            gradient = gradient.mul_(1 / len(rows)).to(weight.dtype)
            if rows_grad is not None:
                torch.mm(gradient, weight, out=rows_grad[part])
            if weight_grad is not None:
                weight_grad.addmm_(gradient.t(), rows[part])
            if bias_grad is not None:
                bias_grad += gradient.sum(0)
        ctx.save_for_backward(rows_grad, weight_grad, bias_grad)
        return (total / len(rows)).to(torch.float32 if in_fp32 else rows.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        kept = ctx.saved_tensors
        scaled = (None if each is None else each.mul_(gradient.to(each.dtype)) for each in kept)
        return (*scaled, None, None)


def _loss_and_gradient(
    rows: Tensor, weight: Tensor, bias: Tensor | None, wanted: Tensor, in_fp32: bool
) -> tuple[Tensor, Tensor]:
    """The sum of a part's losses, and its gradient in the logits' place."""
    logits = F.linear(rows, weight, bias)
    log_probabilities = F.log_softmax(logits.float() if in_fp32 else logits, dim=1)
    loss = F.nll_loss(log_probabilities, wanted, reduction="sum")
    gradient = log_probabilities.exp_()
    gradient.scatter_add_(1, wanted[:, None], gradient.new_full((len(wanted), 1), -1.0))
    return loss, gradient
