"""Causal self-attention with grouped queries: rotary positions, sliding windows, soft caps, sinks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fsdpbench.workloads.decoder.rotary import rotate
from fsdpbench.workloads.decoder.shape import DecoderShape
from fsdpbench.workloads.layers import Projection
from fsdpbench.workloads.parts import held


def causal_mask(seq: int, window: int, like: Tensor) -> Tensor:
    """What is added to scores, [seq, seq]: 0 where a token may look, -inf at later ones and, with a `window`,
    at those `window` or more back."""
    mask = torch.full((seq, seq), -torch.inf, dtype=like.dtype, device=like.device).triu_(1)
    if window:
        mask = mask + torch.full_like(mask, -torch.inf).tril_(-window)
    return mask


class DecoderAttention(nn.Module):
    """Attention of [batch, seq, d_model]; `mask` as `causal_mask` makes it, None: all earlier tokens."""

    def __init__(self, shape: DecoderShape, output_std: float) -> None:
        super().__init__()
        self.width, self.groups = shape.head_width, shape.heads // shape.kv_heads
        self.scale = (shape.query_scale or shape.head_width) ** -0.5
        self.explicit, self.cap, self.dropout = (
            shape.attention == "explicit",
            shape.score_cap,
            shape.attention_dropout,
        )
        self.residual_dropout = shape.residual_dropout
        widths = (shape.query_width, shape.kv_width, shape.kv_width)
        self.widths = widths
        self.fused = shape.fused_projections
        if self.fused:
            self.query_key_value = Projection(shape.d_model, sum(widths), shape.qkv_bias)
        else:
            self.query = Projection(shape.d_model, widths[0], shape.qkv_bias)
            self.key = Projection(shape.d_model, widths[1], shape.qkv_bias)
            self.value = Projection(shape.d_model, widths[2], shape.qkv_bias)
        self.output = Projection(shape.query_width, shape.d_model, shape.output_bias, output_std)
        self.query_norm = make_norm(shape, shape.head_width) if shape.qk_norm else None
        self.key_norm = make_norm(shape, shape.head_width) if shape.qk_norm else None
        self.sinks = nn.Parameter(torch.empty(shape.heads)) if shape.sinks else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sinks begin at a score of 0; the rest is of other modules."""
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor, mask: Tensor | None) -> Tensor:
        if self.fused:
            parts = self._apart(self.query_key_value(x))
        else:
            parts = (self.query(x), self.key(x), self.value(x))
        query, key, value = (part.unflatten(-1, (-1, self.width)).transpose(1, 2) for part in parts)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        query, key = rotate(query, cosines, sines), rotate(key, cosines, sines)
        attend = self._explicit if self.explicit else self._fused
        mixed = attend(query, key, value, mask)
        projected: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return F.dropout(projected, self.residual_dropout, self.training)

    def _apart(self, joined: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values of the heads that this rank has (its share under tensor parallelism)."""
        ranks = sum(self.widths) // joined.shape[-1]
        return joined.split([width // ranks for width in self.widths], dim=-1)

    def _fused(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        grouped = self.groups > 1
        if mask is not None and grouped:  # CUDA's kernels that take a mask take no groups
            key, value = (x.repeat_interleave(self.groups, dim=1) for x in (key, value))
            grouped = False
        return F.scaled_dot_product_attention(
            query, key, value, mask, dropout, mask is None, scale=self.scale, enable_gqa=grouped
        )

    def _explicit(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        assert mask is not None, "explicit attention is always given its mask"
        if self.groups > 1:
            key, value = (x.repeat_interleave(self.groups, dim=1) for x in (key, value))
        scores = query @ key.transpose(-1, -2) * self.scale
        if self.cap:
            scores = torch.tanh(scores / self.cap) * self.cap
        scores = scores + mask
        if self.sinks is not None:
            sinks = held(self.sinks).view(1, -1, 1, 1).expand(len(scores), -1, scores.shape[-2], 1)
            scores = torch.cat((scores, sinks.to(scores.dtype)), dim=-1)
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
        if self.sinks is not None:
            weights = weights[..., :-1]
        return F.dropout(weights, self.dropout, self.training) @ value


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
