"""Modules of the decoder: attention with grouped queries, blocks, token embedding and lm head."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fsdpbench.workloads.blocks import CheckpointedBlock
from fsdpbench.workloads.checkpointing import ActivationCheckpointing
from fsdpbench.workloads.decoder.experts import DecoderFeedForward, Mixture
from fsdpbench.workloads.decoder.shape import DecoderShape
from fsdpbench.workloads.layers import WEIGHT_STD, DecoderNorm, Lookup, Projection, held
from fsdpbench.workloads.losses import ComputesTokenLoss
from fsdpbench.workloads.rotations import rotary_tables, rotate
from fsdpbench.workloads.shape import Rope


def causal_mask(seq: int, window: int, like: Tensor) -> Tensor:
    """Return the mask to add to scores, [seq, seq]: 0 for visible tokens, -inf for later tokens and, with a
    `window`, for tokens at a distance of `window` or more."""
    mask = torch.full((seq, seq), -torch.inf, dtype=like.dtype, device=like.device).triu_(1)
    if window:
        mask = mask + torch.full_like(mask, -torch.inf).tril_(-window)
    return mask


class DecoderAttention(nn.Module):
    """Causal self-attention of [batch, seq, d_model] with grouped queries, rotary positions, sliding windows,
    soft caps and sinks. `mask` is from `causal_mask`; None means all earlier tokens."""

    def __init__(self, shape: DecoderShape, output_std: float) -> None:
        super().__init__()
        self.width, self.groups = shape.head_width, shape.heads // shape.kv_heads
        self.scale = (shape.query_scale or shape.head_width) ** -0.5
        self.explicit, self.cap = shape.attention == "explicit", shape.score_cap
        self.dropout, self.residual_dropout = shape.attention_dropout, shape.residual_dropout
        self.widths = widths = (shape.query_width, shape.kv_width, shape.kv_width)
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
        """Set the sinks to a score of 0; other modules reset themselves."""
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor, mask: Tensor | None) -> Tensor:
        """Return [batch, seq, d_model]. `mask` is [seq, seq], or None if the kernel masks causally."""
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
        """Split into queries, keys and values of this rank's heads (with tensor parallelism, a subset)."""
        ranks = sum(self.widths) // joined.shape[-1]
        return joined.split([width // ranks for width in self.widths], dim=-1)

    def _fused(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        grouped = self.groups > 1
        if mask is not None and grouped:  # CUDA kernels that accept a mask do not accept groups
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


def make_norm(shape: DecoderShape, width: int | None = None) -> nn.Module:
    """Return a norm of the kind in `shape`, over d_model or `width`."""
    if shape.norm == "layer":
        return nn.LayerNorm(width or shape.d_model, eps=shape.norm_eps)
    return DecoderNorm(
        width or shape.d_model,
        shape.norm_eps,
        offset=shape.norm == "rms-offset",
        composed=shape.norms == "composed",
    )


class DecoderBlock(CheckpointedBlock):
    """Attention and feed-forward (or experts) with residual connections: the natural FSDP unit."""

    def __init__(self, shape: DecoderShape, checkpointing: ActivationCheckpointing, index: int) -> None:
        super().__init__(checkpointing, index)
        self.random = shape.drops
        self.slides, self.parallel = shape.slides(index), shape.parallel
        output_std = WEIGHT_STD / math.sqrt(2 * shape.layers)
        self.attention_norm = make_norm(shape)
        self.attention = DecoderAttention(shape, output_std)
        self.after_attention = make_norm(shape) if shape.post_norms else None
        self.feed_forward_norm = None if shape.parallel else make_norm(shape)
        self.feed_forward: nn.Module
        if shape.is_mixture(index):
            self.feed_forward = Mixture(shape, output_std, index)
        else:
            self.feed_forward = DecoderFeedForward(shape, output_std)
        self.after_feed_forward = make_norm(shape) if shape.post_norms else None

    def transform(
        self,
        x: Tensor,
        cosines: Tensor,
        sines: Tensor,
        local_cosines: Tensor,
        local_sines: Tensor,
        mask: Tensor | None,
        local_mask: Tensor | None,
    ) -> Tensor:
        """Keep the shape [batch, seq, d_model]; sliding layers use the local tables and mask."""
        if self.slides:
            cosines, sines, mask = local_cosines, local_sines, local_mask
        normed = self.attention_norm(x)
        attended = self.attention(normed, cosines, sines, mask)
        if self.feed_forward_norm is None:
            parallel: Tensor = attended + self.feed_forward(normed) + x
            return parallel
        if self.after_attention is not None:
            attended = self.after_attention(attended)
        x = x + attended
        fed: Tensor = self.feed_forward(self.feed_forward_norm(x))
        if self.after_feed_forward is not None:
            fed = self.after_feed_forward(fed)
        return x + fed


class Decoder(ComputesTokenLoss, nn.Module):
    """The model: `decoder(inputs)` returns logits, `decoder(inputs, targets)` the mean cross entropy.

    Inputs and targets are int64 [batch, seq], logits [batch, seq, vocab] in the parameters' dtype.
    """

    def __init__(self, shape: DecoderShape, checkpointing: ActivationCheckpointing) -> None:
        super().__init__()
        self.shape = shape
        self.token_embedding = Lookup(shape.vocab, shape.d_model)
        self.blocks = nn.ModuleList(DecoderBlock(shape, checkpointing, i) for i in range(shape.layers))
        self.final_norm = make_norm(shape)
        self.lm_head = Projection(shape.d_model, shape.vocab, bias=shape.head_bias)
        if shape.tied:
            self.lm_head.weight = self.token_embedding.weight

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        shape = self.shape
        x = self.token_embedding(inputs)
        if shape.embedding_scale:
            x = x * math.sqrt(shape.d_model)
        x = F.dropout(x, shape.embedding_dropout, self.training)
        context = self._context(inputs.shape[1], x)
        for block in self.blocks:
            x = block(x, *context)
        cap = shape.logit_cap  # logits are squashed into (-cap, cap)
        capped = (lambda logits: (logits / cap).tanh() * cap) if cap else None
        return self.logits_or_loss(self.final_norm(x), targets, shape.fp32_loss, capped)

    def _context(self, seq: int, x: Tensor) -> tuple[Tensor | None, ...]:
        """Return rotary tables and masks for full and for sliding layers; equal ones are shared."""
        shape, rope = self.shape, Rope.parse(self.shape.rope)
        tables = local = rotary_tables(seq, shape.rotary_width, shape.rope_theta, x, rope)
        if shape.local_theta and shape.window:
            local = rotary_tables(seq, shape.rotary_width, shape.local_theta, x)
        explicit = shape.attention == "explicit"
        mask = local_mask = causal_mask(seq, 0, x) if explicit else None
        if 0 < shape.window < seq and "S" in shape.layer_pattern:
            local_mask = causal_mask(seq, shape.window, x)
        return (*tables, *local, mask, local_mask)
