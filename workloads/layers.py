"""Parts that the families share: layers, whose `reset_parameters` draws what the models want, be it long
after a build on `meta`, and the loss of token models."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

# GPT-2's standard deviation of weights (Radford et al. 2019, and its published code).
WEIGHT_STD = 0.02


class Projection(nn.Linear):
    """A linear layer with weights from N(0, std) and zero bias."""

    def __init__(self, in_features: int, out_features: int, bias: bool, std: float = WEIGHT_STD) -> None:
        self.std = std  # before super().__init__, which calls reset_parameters
        super().__init__(in_features, out_features, bias)

    def reset_parameters(self) -> None:
        _draw(self.weight, self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Lookup(nn.Embedding):
    """An embedding with weights from N(0, std)."""

    def __init__(self, entries: int, features: int, std: float = WEIGHT_STD) -> None:
        self.std = std
        super().__init__(entries, features)

    def reset_parameters(self) -> None:
        _draw(self.weight, self.std)


def _draw(weight: Tensor, std: float) -> None:
    """Draw from N(0, std). On `meta` there is nothing to draw, and torch's rules for it, which are in Python,
    took a twentieth of a simulated run."""
    if not weight.is_meta:
        nn.init.normal_(weight, std=std)


class ComputesTokenLoss:
    """A module whose forward ends in `token_loss`, in what was compiled of it, or in a loss that has the lm
    head inside (`linear_loss.py`)."""

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
        """Logits of `hidden` [batch, seq, d_model], or with `targets` their loss. `of_logits`: what follows
        the product. `plain`: in the place of `token_loss`."""
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
    """Mean cross entropy of `logits`, [batch, seq, vocab], against `targets`, int64 of [batch, seq].

    `in_fp32`: the logits are cast before, as most mixed precision training does (batch x seq x vocab x 4 B).
    """
    rows, wanted = logits.flatten(0, 1), targets.flatten()
    if isinstance(rows, DTensor):  # each rank has its share of the vocabulary: torch's loss alone knows
        whole = F.cross_entropy(rows.float() if in_fp32 else rows, wanted)
        return whole.to_local() if isinstance(whole, DTensor) else whole
    if in_fp32:
        return F.cross_entropy(rows.float(), wanted)
    loss: Tensor = _LeanCrossEntropy.apply(rows, wanted)
    return loss


class _LeanCrossEntropy(torch.autograd.Function):
    """Mean cross entropy whose gradient overwrites the log-probabilities that were kept for it.

    `F.cross_entropy` holds three tensors of the logits' size in its backward (log-probabilities, their
    gradient, the logits' gradient), this one, as the fused losses of training libraries do. One backward
    only: a second one is refused by autograd, which sees that what was kept has changed.
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
