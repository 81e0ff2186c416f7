"""The decoder: attention with grouped queries, blocks, token embedding and lm head; and its workload.

FLOPs as for the other families: 2 a token and weight of each product that it passes through (of the experts,
those that it is sent to; with a capacity, all places of the buffers, of which the model needs the filled
ones), and attention in full although it is causal or sees a window.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fsdpbench.workloads.base import BlockFlops, NextTokenWorkload
from fsdpbench.workloads.checkpointing import ActivationCheckpointing, CheckpointedBlock
from fsdpbench.workloads.decoder.experts import (
    BufferRows,
    DecoderFeedForward,
    Mixture,
    buffer_rows_of,
    capacity_of,
    expert_loads,
)
from fsdpbench.workloads.decoder.shape import FAMILY, DecoderShape
from fsdpbench.workloads.layers import WEIGHT_STD, DecoderNorm, Lookup, Projection, held
from fsdpbench.workloads.losses import ComputesTokenLoss
from fsdpbench.workloads.rotations import Rope, rotary_tables, rotate
from fsdpbench.workloads.shape import WorkloadError
from fsdpbench.workloads.tensor_plan import ATTENTION_LAYERS, BlockPlan, Product, TensorPlan


def causal_mask(seq: int, window: int, like: Tensor) -> Tensor:
    """Return the mask that is added to scores, [seq, seq]: 0 where a token may look, -inf at later tokens
    and, with a `window`, at tokens `window` or more back."""
    mask = torch.full((seq, seq), -torch.inf, dtype=like.dtype, device=like.device).triu_(1)
    if window:
        mask = mask + torch.full_like(mask, -torch.inf).tril_(-window)
    return mask


class DecoderAttention(nn.Module):
    """Causal self-attention of [batch, seq, d_model] with grouped queries, rotary positions, sliding windows,
    soft caps and sinks; `mask` as `causal_mask` makes it, None: all earlier tokens."""

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
        """Set the sinks to a score of 0; other modules reset the rest."""
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor, mask: Tensor | None) -> Tensor:
        """Return [batch, seq, d_model]; `mask` [seq, seq] is None for causal attention by the kernel."""
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
        """Split into queries, keys and values of this rank's heads (under tensor parallelism, a share)."""
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


def make_norm(shape: DecoderShape, width: int | None = None) -> nn.Module:
    """Make the norm of `shape`, over d_model or `width`."""
    if shape.norm == "layer":
        return nn.LayerNorm(width or shape.d_model, eps=shape.norm_eps)
    return DecoderNorm(
        width or shape.d_model,
        shape.norm_eps,
        offset=shape.norm == "rms-offset",
        composed=shape.norms == "composed",
    )


def norm_parameters(shape: DecoderShape, width: int | None = None) -> int:
    """Return the parameters of such a norm."""
    return (width or shape.d_model) * (2 if shape.norm == "layer" else 1)


class DecoderBlock(CheckpointedBlock):
    """Attention and feed-forward (or experts) with their residual connections: the natural FSDP unit."""

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
        """Compute [batch, seq, d_model] to the same; sliding layers take the local tables and mask."""
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
    """The model: `decoder(inputs)` gives logits, `decoder(inputs, targets)` the mean cross entropy.

    Inputs and targets are int64 of shape [batch, seq], logits [batch, seq, vocab] in the parameters' dtype.
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
        cap = shape.logit_cap  # logits are bent into -cap to cap
        capped = (lambda logits: (logits / cap).tanh() * cap) if cap else None
        return self.logits_or_loss(self.final_norm(x), targets, shape.fp32_loss, capped)

    def _context(self, seq: int, x: Tensor) -> tuple[Tensor | None, ...]:
        """Return the rotary tables and masks of full and of sliding layers; equal ones are shared."""
        shape, rope = self.shape, Rope.parse(self.shape.rope)
        tables = local = rotary_tables(seq, shape.rotary_width, shape.rope_theta, x, rope)
        if shape.local_theta and shape.window:
            local = rotary_tables(seq, shape.rotary_width, shape.local_theta, x)
        explicit = shape.attention == "explicit"
        mask = local_mask = causal_mask(seq, 0, x) if explicit else None
        if 0 < shape.window < seq and "S" in shape.layer_pattern:
            local_mask = causal_mask(seq, shape.window, x)
        return (*tables, *local, mask, local_mask)


class DecoderWorkload(NextTokenWorkload[DecoderShape]):
    """A decoder of one shape, with tokens as data."""

    family = FAMILY
    shape_type = DecoderShape
    module_type = Decoder
    block_classes = (DecoderBlock,)

    @property
    def parameters(self) -> int:
        s = self.spec
        embeddings = s.vocab * s.d_model * (1 if s.tied else 2) + (s.vocab if s.head_bias else 0)
        blocks = sum(self._block_parameters(layer) for layer in range(s.layers))
        return blocks + norm_parameters(s) + embeddings

    def _block_parameters(self, layer: int) -> int:
        s = self.spec
        weights = self.product_weights(layer)
        biases = (s.query_width + 2 * s.kv_width) * s.qkv_bias + s.d_model * s.output_bias
        norms = (1 if s.parallel else 4 if s.post_norms else 2) * norm_parameters(s)
        norms += 2 * norm_parameters(s, s.head_width) * s.qk_norm
        mixture = s.is_mixture(layer)
        if mixture:
            weights += s.experts * 3 * s.d_model * s.expert_d_ff
            biases += s.experts * (s.router_bias + (2 * s.expert_d_ff + s.d_model) * s.expert_bias)
        if not mixture or s.shared_d_ff:
            d_ff = s.shared_d_ff if mixture else s.d_ff
            biases += (d_ff * (2 if s.gated else 1) + s.d_model) * s.mlp_bias
        return weights + biases + norms + s.heads * s.sinks

    def products(self, layer: int) -> list[Product]:
        s = self.spec
        widths = {"query": s.query_width, "key": s.kv_width, "value": s.kv_width}
        if s.fused_projections:
            widths = {"query_key_value": sum(widths.values())}
        found = [Product(name, s.d_model, width) for name, width in widths.items()]
        found.append(Product("output", s.query_width, s.d_model))
        if not s.is_mixture(layer):
            return found + self._feed_forward(s.d_ff)
        found.append(Product("router", s.d_model, s.experts))
        if s.shared_gate:
            found.append(Product("shared_gate", s.d_model, 1))
        return found + (self._feed_forward(s.shared_d_ff) if s.shared_d_ff else [])

    def _feed_forward(self, width: int) -> list[Product]:
        s = self.spec
        if s.gated and s.fused_projections:
            found = [Product("gate_up", s.d_model, 2 * width)]
        else:
            names = ("gate", "up") if s.gated else ("up",)
            found = [Product(name, s.d_model, width) for name in names]
        return [*found, Product("down", width, s.d_model)]

    def tensor_plan(self) -> TensorPlan:
        s = self.spec
        mixtures = "M" in s.moe_pattern
        if mixtures and s.parallel:
            raise WorkloadError(f"{self.name} is a mixture in parallel blocks, which tp does not cut: use ep")
        divides = {"heads": s.heads, "kv_heads": s.kv_heads, "vocab": s.vocab}
        divides |= {"d_ff": s.d_ff} if "D" in s.moe_pattern else {}
        period = min(s.layers, len(s.moe_pattern)) if mixtures else 1
        blocks = tuple(self._block_plan(layer) for layer in range(period))
        return TensorPlan(blocks, {"token_embedding": 1}, ("final_norm",), "lm_head", s.tied, divides)

    def _block_plan(self, layer: int) -> BlockPlan:
        s, mixture = self.spec, self.spec.is_mixture(layer)
        products = self.products(layer)
        cut = [p for p in products if p.name in ATTENTION_LAYERS] if mixture else products
        columns: dict[str, tuple[int, ...]] = {}
        for product in cut:
            if product.name not in ("output", "down"):
                parts = {
                    "query_key_value": (s.query_width, s.kv_width, s.kv_width),
                    "gate_up": (s.d_ff, s.d_ff),
                }
                part = "feed_forward" if product.name in ("gate", "up", "gate_up") else "attention"
                columns[f"{part}.{product.name}"] = parts.get(product.name, (product.outputs,))
        norms = ["attention_norm"] + ([] if s.parallel else ["feed_forward_norm"])
        norms += ["after_attention", "after_feed_forward"] if s.post_norms else []
        return BlockPlan(
            readers=("attention",) if mixture else ("attention", "feed_forward"),
            columns=columns,
            rows=("attention.output",) if mixture else ("attention.output", "feed_forward.down"),
            norms=tuple(norms),
            head_norms=("attention.query_norm", "attention.key_norm") if s.qk_norm else (),
            by_head=("attention.sinks",) if s.sinks else (),
            by_token=tuple(_in_mixture(p.name) for p in products[len(cut) :]) if mixture else (),
            whole=("feed_forward.experts",) if mixture else (),
        )

    def buffer_rows(self, tokens: int) -> BufferRows | None:
        s = self.spec
        if not s.capacity:
            return None
        mixtures = [layer for layer in range(s.layers) if s.is_mixture(layer)]
        each = [buffer_rows_of(expert_loads(s, tokens, layer), capacity_of(s, tokens)) for layer in mixtures]
        return BufferRows(*map(sum, zip(*each, strict=True))) if each else None

    def block_flops(self, layer: int, tokens: int, seq: int) -> BlockFlops:
        s = self.spec
        products = [2 * tokens * p.inputs * p.outputs for p in self.products(layer)]
        batched, empty, mixture = 0, 0, s.is_mixture(layer)
        if mixture:
            loads = expert_loads(s, tokens, layer)
            a_row = 2 * s.d_model * s.expert_d_ff
            if s.capacity:
                rows = buffer_rows_of(loads, capacity_of(s, tokens))
                loads, empty = [capacity_of(s, tokens)] * s.experts, 3 * a_row * rows.empty
            if len(set(loads)) == 1:
                batched = 3 * a_row * sum(loads)
            else:
                products += [part for load in loads if load for part in (2 * a_row * load, a_row * load)]
        needed = mixture or s.post_norms or s.residual_dropout > 0
        attention = 4 * tokens * s.query_width * seq
        return BlockFlops(tuple(products), attention, ends_needed=needed, batched=batched, empty=empty)


def _in_mixture(name: str) -> str:
    """Return the path in a mixture's block of the layer that `products` calls `name`."""
    return f"feed_forward.{name}" if name in ("router", "shared_gate") else f"feed_forward.shared.{name}"
