"""The decoder's workload, and the load of its experts.

FLOPs are counted as for other families: 2 per token and weight of each product that the token passes through
(for experts, those that it is sent to; with a capacity, all rows of the buffers, of which only the filled
ones count for the model), and attention in full although it is causal or windowed.
"""

import math
import random
from typing import NamedTuple, Protocol, runtime_checkable

from fsdpbench.workloads.base import BlockFlops, NextTokenWorkload
from fsdpbench.workloads.decoder.shape import FAMILY, DecoderShape
from fsdpbench.workloads.shape import WorkloadError
from fsdpbench.workloads.tensor_plan import ATTENTION_LAYERS, BlockPlan, Product, TensorPlan


def norm_parameters(shape: DecoderShape, width: int | None = None) -> int:
    """Return the number of parameters of a norm over `width` elements, by default d_model."""
    return (width or shape.d_model) * (2 if shape.norm == "layer" else 1)


class DecoderWorkload(NextTokenWorkload[DecoderShape]):
    """A decoder of one shape, with tokens as data."""

    family = FAMILY
    shape_type = DecoderShape
    code = "fsdpbench.workloads.decoder.model"
    model_class = "Decoder"
    names_of_blocks = ("DecoderBlock",)

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

    def buffer_rows(self, tokens: int) -> "BufferRows | None":
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
    """Return the path inside a mixture's block of the layer that `products` calls `name`."""
    return f"feed_forward.{name}" if name in ("router", "shared_gate") else f"feed_forward.shared.{name}"


def expert_loads(shape: DecoderShape, tokens: int, layer: int) -> list[int]:
    """Return the rows of each expert: tokens x experts_per_token in total, at most `tokens` per expert.

    Skewed loads fall as rank^-router_skew, over experts in an order drawn from seed and layer.
    """
    rows, experts = tokens * shape.experts_per_token, shape.experts
    if shape.router_load == "balanced":
        return [rows // experts + (index < rows % experts) for index in range(experts)]
    shares = [(rank + 1.0) ** -shape.router_skew for rank in range(experts)]
    by_rank, left, weight = [], rows, sum(shares)
    for rank, share in enumerate(shares):
        others = experts - rank - 1
        count = min(tokens, max(round(left * share / weight), left - others * tokens))
        by_rank.append(count)
        left, weight = left - count, weight - share
    order = list(range(experts))
    random.Random(f"{shape.router_seed}-{layer}").shuffle(order)
    loads = [0] * experts
    for rank, expert in enumerate(order):
        loads[expert] = by_rank[rank]
    return loads


def capacity_of(shape: DecoderShape, tokens: int) -> int:
    """Return the rows of an expert's buffer: `capacity` times the balanced share, at most `tokens`."""
    share = shape.capacity * tokens * shape.experts_per_token / shape.experts
    return min(tokens, math.ceil(share))


class BufferRows(NamedTuple):
    """Counts of rows sent to experts, of dropped rows, and of empty rows that are computed."""

    sent: int
    dropped: int
    empty: int


def buffer_rows_of(loads: list[int], capacity: int) -> "BufferRows":
    """Return the counts of rows in one forward of a layer."""
    sent, dropped = sum(loads), sum(max(0, load - capacity) for load in loads)
    return BufferRows(sent, dropped, capacity * len(loads) - (sent - dropped))


@runtime_checkable
class HasBuffers(Protocol):
    """A workload whose experts may have buffers of a capacity."""

    def buffer_rows(self, tokens: int) -> "BufferRows | None":
        """Return the counts of rows in one forward over `tokens`, in all layers; None without a capacity."""
