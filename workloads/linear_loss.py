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
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fsdpbench.workloads.layers import ComputesTokenLoss, token_loss

OfLogits = Callable[[Tensor], Tensor]
LinearLoss = Callable[..., Tensor]


class _Given(NamedTuple):
    """`rows` [rows, d_model], of which each has a word in `wanted` [rows], and the lm head."""

    rows: Tensor
    weight: Tensor
    bias: Tensor | None
    wanted: Tensor
    in_fp32: bool


def _linear_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    in_fp32: bool,
    of_logits: OfLogits | None = None,
    *,
    of_rows: Callable[[_Given, OfLogits | None], Tensor],
) -> Tensor:
    """Mean cross entropy of `hidden` [batch, seq, d_model] times `weight` [vocab, d_model], against int64
    `targets` [batch, seq]. `of_logits`: what follows the product. `of_rows`: how it is computed."""
    given = _Given(hidden.flatten(0, 1), weight, bias, targets.flatten(), in_fp32)
    return of_rows(given, of_logits)


def _chunked(given: _Given, of_logits: OfLogits | None) -> Tensor:
    """Logits are computed again in backward."""
    rows, weight, bias, wanted, in_fp32 = given
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


def _fused(given: _Given, of_logits: OfLogits | None) -> Tensor:
    """Gradients are computed in forward. `of_logits` has to be None: its gradient is unknown."""
    assert of_logits is None
    wanted = torch.is_grad_enabled()  # an autograd function is not told
    loss: Tensor = _FusedLinearLoss.apply(*_as_autocast(given), wanted)
    return loss


def _as_autocast(given: _Given) -> _Given:
    """What autocast would make of the product's factors, which it does not see in the products of gradients:
    they write into tensors that are there."""
    device = given.rows.device.type
    if not torch.is_autocast_enabled(device):
        return given
    dtype = torch.get_autocast_dtype(device)
    bias = None if given.bias is None else given.bias.to(dtype)
    return given._replace(rows=given.rows.to(dtype), weight=given.weight.to(dtype), bias=bias)


LINEAR_LOSSES: dict[str, LinearLoss] = {
    "chunked": partial(_linear_loss, of_rows=_chunked),
    "fused": partial(_linear_loss, of_rows=_fused),
}


def use_linear_loss(model: ComputesTokenLoss, kind: str) -> None:
    """Have `model` compute lm head and loss together. Only then has its head a forward of its own: Dynamo
    compiles no frame of torch's layers, and those of the family's other products are such."""
    model.linear_loss = LINEAR_LOSSES[kind]
    model.lm_head.forward = MethodType(_product_or_loss, model.lm_head)


def _product_or_loss(head: Any, x: Tensor, loss: Callable[..., Tensor] | None = None) -> Tensor:
    """The product, or what `loss` makes of input, weight and bias: by a call of the module, so that a unit's
    hooks run."""
    found: Tensor = type(head).forward(head, x) if loss is None else loss(x, head.weight, head.bias)
    return found


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
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        wanted: Tensor,
        in_fp32: bool,
        with_gradients: bool,
    ) -> Tensor:
        of_rows, of_weight, of_bias = (with_gradients and needed for needed in ctx.needs_input_grad[:3])
        trains = of_rows or of_weight or of_bias
        rows_grad = torch.empty_like(rows) if of_rows else None
        weight_grad = torch.zeros_like(weight) if of_weight else None
        bias_grad = torch.zeros_like(bias) if bias is not None and of_bias else None
        total = rows.new_zeros((), dtype=torch.promote_types(rows.dtype, torch.float32))
        for part in _parts(len(rows), weight):
            loss, gradient = _loss_and_gradient(rows[part], weight, bias, wanted[part], in_fp32, trains)
            total += loss
            if gradient is None:
                continue
            gradient = gradient.mul_(1 / len(rows)).to(weight.dtype)
            if rows_grad is not None:
                torch.mm(gradient, weight, out=rows_grad[part])
            if weight_grad is not None:
                weight_grad.addmm_(gradient.t(), rows[part])
            if bias_grad is not None:
                bias_grad += gradient.sum(0)
        ctx.save_for_backward(rows_grad, weight_grad, bias_grad)
        return (total / len(rows)).to(loss.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        kept = ctx.saved_tensors
        scaled = (None if each is None else each.mul_(gradient.to(each.dtype)) for each in kept)
        return (*scaled, None, None, None)


def _loss_and_gradient(
    rows: Tensor, weight: Tensor, bias: Tensor | None, wanted: Tensor, in_fp32: bool, trains: bool
) -> tuple[Tensor, Tensor | None]:
    """The sum of a part's losses, and its gradient in the logits' place if it `trains`."""
    logits = F.linear(rows, weight, bias)
    log_probabilities = F.log_softmax(logits.float() if in_fp32 else logits, dim=1)
    loss = F.nll_loss(log_probabilities, wanted, reduction="sum")
    if not trains:
        return loss, None
    gradient = log_probabilities.exp_()
    gradient.scatter_add_(1, wanted[:, None], gradient.new_full((len(wanted), 1), -1.0))
    return loss, gradient
