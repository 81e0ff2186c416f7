"""RMSNorm in the forms that published models use it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fsdpbench.workloads.decoder.shape import DecoderShape


class DecoderNorm(nn.Module):
    """x / rms(x) x weight over the last dimension, [..., width] to the same (Zhang and Sennrich 2019).

    Args:
        offset: weights are told from 1 (Gemma).
        composed: single operators in fp32, each with its result in memory, instead of torch's one kernel.
    """

    def __init__(self, width: int, eps: float, *, offset: bool, composed: bool) -> None:
        super().__init__()
        self.eps, self.offset, self.composed = eps, offset, composed
        self.weight = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As if there were no weight."""
        nn.init.constant_(self.weight, 0.0 if self.offset else 1.0)

    def forward(self, x: Tensor) -> Tensor:
        if not self.composed:
            weight = 1.0 + self.weight if self.offset else self.weight
            return F.rms_norm(x, weight.shape, weight, self.eps)
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.offset:
            return (normed * (1.0 + self.weight.float())).type_as(x)
        return self.weight * normed.type_as(x)


def make_norm(shape: DecoderShape, width: int | None = None) -> nn.Module:
    """The norm of `shape`, over d_model or `width`."""
    if shape.norm == "layer":
        return nn.LayerNorm(width or shape.d_model, eps=shape.norm_eps)
    return DecoderNorm(
        width or shape.d_model,
        shape.norm_eps,
        offset=shape.norm == "rms-offset",
        composed=shape.norms == "composed",
    )


def norm_parameters(shape: DecoderShape, width: int | None = None) -> int:
    """How many it has."""
    return (width or shape.d_model) * (2 if shape.norm == "layer" else 1)
