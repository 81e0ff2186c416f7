"""Losses of models: token losses, with or without the lm head, and the classification loss.

`chunked` and `fused` compute the lm head and the loss together, on one part of the tokens after another, so
that the full logits are never in memory:

    hidden [rows, d_model] ──┬─ part 0 ── @ weight.T ── logits [rows / n, vocab] ── loss ─┐
                             ├─ part 1 ── ...                                             ├─ sum
                             └─ part n-1                                                  ┘

With a large vocabulary, logits are the largest activation of a language model: 8,192 tokens over 128,256
words take 2.1 GB in bf16, and their loss in fp32 holds twice that several times. The number of parts is vocab
/ d_model, so that the logits of a part have as many elements as all of `hidden`: the rule of Liger Kernel's
fused linear cross entropy (Hsu et al. 2024, arXiv 2410.10989).

`chunked` checkpoints each part and recomputes its logits in backward. `fused` computes the gradient of each
part's logits in forward, and from it those of hidden states and weight, which backward only scales. It
recomputes nothing, but allows only one backward, like `_LeanCrossEntropy`.
"""

from collections.abc import Callable, Iterator
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

OfLogits = Callable[[Tensor], Tensor]


class ComputesTokenLoss:
    """Mixin for modules whose forward ends in `token_loss`, a compiled loss, or one with the head inside."""

    compiled_loss: Callable[[Tensor, Tensor, bool], Tensor] | None = None
    linear_loss: Callable[..., Tensor] | None = None
    lm_head: nn.Module

    def logits_or_loss(
        self,
        hidden: Tensor,
        targets: Tensor | None,
        in_fp32: bool,
        of_logits: Callable[[Tensor], Tensor] | None = None,
        plain: Callable[[Tensor, Tensor, bool], Tensor] | None = None,
    ) -> Tensor:
        """Return the logits of `hidden` [batch, seq, d_model], or with `targets` their loss.

        `of_logits`: applied to the product. `plain`: replaces `token_loss`.
        """
        if targets is not None and self.linear_loss is not None:
            loss = partial(self.linear_loss, targets=targets, in_fp32=in_fp32, of_logits=of_logits)
            result: Tensor = self.lm_head(hidden, loss=loss)
            return result
        logits: Tensor = self.lm_head(hidden)
        if of_logits is not None:
            logits = of_logits(logits)
        if targets is None:
            return logits
        return (self.compiled_loss or plain or token_loss)(logits, targets, in_fp32)


def token_loss(logits: Tensor, targets: Tensor, in_fp32: bool) -> Tensor:
    """Return the mean cross entropy of `logits`, [batch, seq, vocab], against `targets`, int64 [batch, seq].

    `in_fp32`: cast the logits first, as most mixed-precision training does (batch x seq x vocab x 4 B).
    """
    from torch.distributed.tensor import DTensor

    rows, wanted = logits.flatten(0, 1), targets.flatten()
    if isinstance(rows, DTensor):  # each rank has a part of the vocabulary, which torch's loss supports
        whole = F.cross_entropy(rows.float() if in_fp32 else rows, wanted)
        return whole.to_local() if isinstance(whole, DTensor) else whole
    if in_fp32:
        return F.cross_entropy(rows.float(), wanted)
    loss: Tensor = _LeanCrossEntropy.apply(rows, wanted)
    return loss


class _LeanCrossEntropy(torch.autograd.Function):
    """Mean cross entropy whose gradient overwrites the saved log-probabilities.

    In backward, `F.cross_entropy` holds three tensors of the logits' size (log-probabilities, their gradient,
    the logits' gradient); this function holds one, like fused losses of training libraries. It allows one
    backward: autograd refuses a second one, because the saved tensor has changed.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, wanted: Tensor) -> Tensor:
        log_probabilities = F.log_softmax(rows, dim=1)
        ctx.save_for_backward(log_probabilities, wanted)
        return F.nll_loss(log_probabilities, wanted)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        log_probabilities, wanted = ctx.saved_tensors
        result = log_probabilities.exp_()
        result.scatter_add_(1, wanted[:, None], result.new_full((len(wanted), 1), -1.0))
        return result.mul_(gradient / len(wanted)), None


def class_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy of `logits`, [batch, classes], against int64 `labels`, [batch]."""
    return F.cross_entropy(logits.float(), labels)


def _chunked(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    in_fp32: bool,
    of_logits: OfLogits | None = None,
) -> Tensor:
    """Return the mean cross entropy of `hidden` [batch, seq, d_model] times `weight` [vocab, d_model] against
    int64 `targets` [batch, seq], in parts whose logits backward recomputes.

    `of_logits`: applied to the product.
    """
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


def _fused(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    in_fp32: bool,
    of_logits: None = None,
) -> Tensor:
    """Return the loss of `_chunked`, with gradients computed in forward; `of_logits` must be None."""
    assert of_logits is None
    rows, device = hidden.flatten(0, 1), hidden.device.type
    if torch.is_autocast_enabled(device):  # autocast does not cast products that write into given tensors
        dtype = torch.get_autocast_dtype(device)
        rows, weight, bias = rows.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    wanted = torch.is_grad_enabled()  # inside an autograd function's forward it is always off
    loss: Tensor = _FusedLinearLoss.apply(rows, weight, bias, targets.flatten(), in_fp32, wanted)
    return loss


LINEAR_LOSSES: dict[str, Callable[..., Tensor]] = {"chunked": _chunked, "fused": _fused}


def use_linear_loss(model: ComputesTokenLoss, kind: str) -> None:
    """Make `model` compute lm head and loss together.

    Only here does the head get its own forward: Dynamo compiles no frames of torch's layers, and other linear
    layers of the family keep torch's forward.
    """
    model.linear_loss = LINEAR_LOSSES[kind]
    model.lm_head.forward = MethodType(_product_or_loss, model.lm_head)


def _product_or_loss(head: Any, x: Tensor, loss: Callable[..., Tensor] | None = None) -> Tensor:
    """Return the product, or `loss` of input, weight and bias, in a module call, so that hooks run."""
    found: Tensor = type(head).forward(head, x) if loss is None else loss(x, head.weight, head.bias)
    return found


def _parts(rows: int, weight: Tensor) -> Iterator[slice]:
    """Yield slices of the rows, about `vocab / d_model` of them."""
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
    """Loss with a linear layer whose forward computes the gradients; backward only scales them."""

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
        """Return the mean loss of `rows` [tokens, width] against the token ids `wanted` [tokens]."""
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
    """Return the sum of a part's losses and, if it `trains`, the gradient of its logits in place."""
    logits = F.linear(rows, weight, bias)
    log_probabilities = F.log_softmax(logits.float() if in_fp32 else logits, dim=1)
    loss = F.nll_loss(log_probabilities, wanted, reduction="sum")
    if not trains:
        return loss, None
    gradient = log_probabilities.exp_()
    gradient.scatter_add_(1, wanted[:, None], gradient.new_full((len(wanted), 1), -1.0))
    return loss, gradient
