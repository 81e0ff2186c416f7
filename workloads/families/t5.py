"""Modules of T5 (`t5_workload.py`).

    source tokens -> embedding -> encoder.blocks.0 ... N-1 -> norm -+
                         | shared                                    | read by the decoder's attention
    target tokens -> embedding -> decoder.blocks.0 ... N-1 -> norm --+-> lm head -> logits

Each stack learns one bias per head for each bucket of distances between two tokens. It is added to the scores
of self-attention; each forward computes it once and passes it to all blocks. Attention scores are not scaled;
their initialisation is. The original (1.0) has a ReLU feed-forward and shares its embedding with the lm head.
Version 1.1 has a gated GELU and a separate head (Shazeer 2020; Hugging Face's `t5-v1_1-*`).
"""

import math
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fsdpbench.workloads.blocks import CheckpointedBlock
from fsdpbench.workloads.checkpointing import ActivationCheckpointing
from fsdpbench.workloads.families.t5_workload import T5Shape
from fsdpbench.workloads.layers import Lookup, Projection
from fsdpbench.workloads.losses import ComputesTokenLoss

_NORM_EPS = 1e-6
_FARTHEST = 128
"""Distances from this one on share the last bucket."""


def distance_buckets(queries: int, keys: int, buckets: int, *, causal: bool, device: torch.device) -> Tensor:
    """Return the bucket of each pair of tokens, int64 of [queries, keys].

    Half of a direction's buckets hold one distance each, the others increasingly wide ranges, up to
    `_FARTHEST` (Raffel et al. 2020, section 2.1). An encoder uses half of its buckets for each direction; a
    decoder only looks back.
    """
    key = torch.arange(keys, device=device)[None, :]
    query = torch.arange(queries, device=device)[:, None]
    if causal:
        distance, offset = (query - key).clamp(min=0), torch.zeros_like(key)
    else:
        buckets //= 2
        distance, offset = (key - query).abs(), (key > query).long() * buckets
    exact = buckets // 2
    growth = (buckets - exact) / math.log(_FARTHEST / exact)
    wide = exact + (torch.log(distance.clamp(min=1).float() / exact) * growth).long()
    return offset + torch.where(distance < exact, distance, wide.clamp(max=buckets - 1))


class PositionBias(nn.Module):
    """Learned bias of self-attention, [1, heads, queries, keys]; a decoder's masks later tokens."""

    def __init__(self, shape: T5Shape, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.by_bucket = Lookup(shape.buckets, shape.heads, std=shape.d_model**-0.5)

    def forward(self, length: int, device: torch.device) -> Tensor:
        buckets = distance_buckets(
            length, length, self.by_bucket.num_embeddings, causal=self.causal, device=device
        )
        bias: Tensor = self.by_bucket(buckets).permute(2, 0, 1).unsqueeze(0).contiguous()
        if self.causal:
            later = torch.ones(length, length, dtype=torch.bool, device=device).triu_(1)
            bias = bias.masked_fill(later, torch.finfo(bias.dtype).min)
        return bias


class T5Attention(nn.Module):
    """Attention of x, [batch, queries, d_model], to itself or to `memory`, [batch, keys, d_model]."""

    def __init__(self, shape: T5Shape) -> None:
        super().__init__()
        self.head_width = shape.d_kv
        self.fused = shape.attention == "fused"
        self.dropout = shape.dropout
        # The query weights include the scale of the scores, which are not divided by sqrt(d_kv).
        self.query = Projection(shape.d_model, shape.inner, False, (shape.d_model * shape.d_kv) ** -0.5)
        self.key = Projection(shape.d_model, shape.inner, False, shape.d_model**-0.5)
        self.value = Projection(shape.d_model, shape.inner, False, shape.d_model**-0.5)
        self.output = Projection(shape.inner, shape.d_model, False, shape.inner**-0.5)

    def forward(self, x: Tensor, bias: Tensor | None = None, memory: Tensor | None = None) -> Tensor:
        memory = x if memory is None else memory
        # This rank's number of heads: all, or a subset with tensor parallelism.
        query, key, value = (
            projected.unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for projected in (self.query(x), self.key(memory), self.value(memory))
        )
        if self.fused:
            dropout = self.dropout if self.training else 0.0
            mixed = F.scaled_dot_product_attention(query, key, value, bias, dropout, scale=1.0)
        else:
            scores = query @ key.transpose(-1, -2)
            if bias is not None:
                scores = scores + bias
            weights = F.softmax(scores.float(), dim=-1).type_as(value)
            mixed = F.dropout(weights, self.dropout, self.training) @ value
        projected: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return F.dropout(projected, self.dropout, self.training)


class T5FeedForward(nn.Module):
    """Perceptron of a block on [batch, seq, d_model], gated or not."""

    def __init__(self, shape: T5Shape) -> None:
        super().__init__()
        self.dropout = shape.dropout
        self.gate = Projection(shape.d_model, shape.d_ff, False, shape.d_model**-0.5) if shape.gated else None
        self.up = Projection(shape.d_model, shape.d_ff, False, shape.d_model**-0.5)
        self.down = Projection(shape.d_ff, shape.d_model, False, shape.d_ff**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            hidden = F.relu(self.up(x))
        else:
            hidden = F.gelu(self.gate(x), approximate="tanh") * self.up(x)
        projected: Tensor = self.down(F.dropout(hidden, self.dropout, self.training))
        return F.dropout(projected, self.dropout, self.training)


class _Block(CheckpointedBlock):
    """Self-attention, a decoder's attention to the encoder's output, and feed-forward: an FSDP unit."""

    decodes: ClassVar[bool]

    def __init__(self, shape: T5Shape, checkpointing: ActivationCheckpointing, index: int) -> None:
        super().__init__(checkpointing, index)
        self.random = shape.dropout > 0
        self.attention_norm = nn.RMSNorm(shape.d_model, eps=_NORM_EPS)
        self.attention = T5Attention(shape)
        if self.decodes:
            self.cross_attention_norm = nn.RMSNorm(shape.d_model, eps=_NORM_EPS)
            self.cross_attention = T5Attention(shape)
        self.feed_forward_norm = nn.RMSNorm(shape.d_model, eps=_NORM_EPS)
        self.feed_forward = T5FeedForward(shape)
        self.position_bias = PositionBias(shape, self.decodes) if shape.bias_each_layer else None

    def transform(self, x: Tensor, length: int, bias: Tensor | None, encoded: Tensor | None = None) -> Tensor:
        """Keep the shape [batch, seq, d_model].

        `length`: tokens in the whole source or target. `bias`: the stack's, or None if the block has its own.
        `encoded`: for a decoder, the encoder's output, [batch, source, d_model].
        """
        if self.position_bias is not None:
            bias = self.position_bias(length, x.device)
        x = x + self.attention(self.attention_norm(x), bias)
        if encoded is not None:
            x = x + self.cross_attention(self.cross_attention_norm(x), memory=encoded)
        return x + self.feed_forward(self.feed_forward_norm(x))


class T5EncoderBlock(_Block):
    """A block of the encoder."""

    decodes = False


class T5DecoderBlock(_Block):
    """A block of the decoder."""

    decodes = True


class T5Stack(nn.Module):
    """Encoder or decoder: blocks with one position bias, and a norm after the last block."""

    def __init__(self, shape: T5Shape, block: type[_Block], checkpointing: ActivationCheckpointing) -> None:
        super().__init__()
        self.dropout = shape.dropout
        self.position_bias = None if shape.bias_each_layer else PositionBias(shape, block.decodes)
        self.blocks = nn.ModuleList(block(shape, checkpointing, index) for index in range(shape.layers))
        self.final_norm = nn.RMSNorm(shape.d_model, eps=_NORM_EPS)

    def forward(self, x: Tensor, length: int, *context: Tensor) -> Tensor:
        # `length` is that of the whole sequence, of which a rank has a part with tensor parallelism.
        bias = None if self.position_bias is None else self.position_bias(length, x.device)
        x = F.dropout(x, self.dropout, self.training)
        for block in self.blocks:
            x = block(x, length, bias, *context)
        return F.dropout(self.final_norm(x), self.dropout, self.training)


class T5(ComputesTokenLoss, nn.Module):
    """The model: `t5(source, target_inputs)` returns logits, with `targets` the mean cross entropy.

    All inputs are int64: source [batch, source], target inputs (the targets shifted by a start token) and
    targets [batch, target]. Logits are [batch, target, vocab] in the parameters' dtype.
    """

    def __init__(self, shape: T5Shape, checkpointing: ActivationCheckpointing) -> None:
        super().__init__()
        self.fp32_loss = shape.fp32_loss
        # A shared embedding has rows of unit variance, so the logits are scaled down.
        self.logit_scale = shape.d_model**-0.5 if shape.tied else 1.0
        self.token_embedding = Lookup(shape.vocab, shape.d_model, std=1.0)
        self.encoder = T5Stack(shape, T5EncoderBlock, checkpointing)
        self.decoder = T5Stack(shape, T5DecoderBlock, checkpointing.after(shape.layers))
        self.lm_head = Projection(
            shape.d_model, shape.vocab, False, 1.0 if shape.tied else shape.d_model**-0.5
        )
        if shape.tied:
            self.lm_head.weight = self.token_embedding.weight

    def forward(self, source: Tensor, target_inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        encoded = self.encoder(self.token_embedding(source), source.shape[1])
        decoded = self.decoder(self.token_embedding(target_inputs), target_inputs.shape[1], encoded)
        scaled = decoded if self.logit_scale == 1.0 else decoded * self.logit_scale
        return self.logits_or_loss(scaled, targets, self.fp32_loss)
