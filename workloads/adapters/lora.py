"""Low-rank adapters (LoRA; Hu et al. 2021, arXiv 2106.09685): a frozen model, small matrices are trained.

    y = x W^T  +  (alpha / rank) (x A^T) B^T        W frozen, A of [rank, in] normal, B of [out, rank] zero

A layer keeps its name and its `weight`, and gains `lora_a` and `lora_b`, so that units and state dicts are
those of the plain model and two more. Frozen parameters are in one dtype (bf16 as a rule: 2 bytes each and
nothing else), adapters in fp32 with gradient and AdamW's moments (16 bytes).

FLOPs: a frozen product costs its forward and the gradient of its input, and not that of its weight. What is
before the first adapter, seen from the tokens, needs no gradient at all.

Frozen weights may be in 4 bits, as QLoRA's (Dettmers et al. 2023, arXiv 2305.14314):

    weight         uint8, [out, in / 2]       two weights a byte: numbers of the 16 levels of NF4
    weight_scale   [out, in / 64]             the largest magnitude of each 64 weights of a row

    y = x W^T,   W = LEVELS[number] * scale   made for the product, again for the input's gradient

Both are frozen parameters of their own, sharded by rows as any other: half a byte a weight and a scale for 64
of them (0.53 bytes with scales in bf16). The scales are not quantised once more.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fsdpbench.base.configuration.config import ShapeValue
from fsdpbench.workloads.base import TRAINING_BYTES, BlockFlops, ForwardFlops, Workload
from fsdpbench.workloads.decoder.experts import BufferRows, HasBuffers
from fsdpbench.workloads.inputs import Batch, Feed
from fsdpbench.workloads.layers import ROUTERS, Projection, held, replace_projections
from fsdpbench.workloads.shape import WorkloadError
from fsdpbench.workloads.tensor_plan import ATTENTION_LAYERS, HasProducts, HasTensorPlan, Product, TensorPlan

ALL, ATTENTION = "all", "attention"
_AT_INPUT, _MIXED, _NARROW, _WIDE = range(4)
_STAGES = {
    **dict.fromkeys(("query", "key", "value", "query_key_value", "qkv"), _AT_INPUT),
    **dict.fromkeys(("output", "proj"), _MIXED),
    **dict.fromkeys(("gate", "up", "gate_up", "router", "shared_gate"), _NARROW),
    "down": _WIDE,
}
"""Inputs of a block's layers, in order: its own, attention's mixture, a norm of that, the hidden layer."""
_ALPHA_OF_RANK = 2.0
BLOCK = 64
# NF4, the quantiles of a normal distribution: appendix E of the QLoRA paper.
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
_RMS = (sum(level * level for level in LEVELS) / len(LEVELS)) ** 0.5

_LIBRARY = torch.library.Library("fsdpbench_workloads", "DEF")

_LIBRARY.define("dequantise_4bit(Tensor packed, Tensor scale) -> Tensor")


def _dequantise(packed: Tensor, scale: Tensor) -> Tensor:
    levels = torch.tensor(LEVELS, dtype=scale.dtype, device=scale.device)
    numbers = torch.stack((packed >> 4, packed & 15), dim=-1)
    weights = levels[numbers.int()].view(len(packed), scale.shape[1], -1)
    return (weights * scale[..., None]).view(len(packed), -1)


# An accelerator runs one kernel for it (bitsandbytes, torchao); a simulated one prices that.
for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("dequantise_4bit", _dequantise, _key)
_LIBRARY.impl("dequantise_4bit", lambda x, scale: scale.new_empty((x.shape[0], 2 * x.shape[1])), "Meta")


def dequantise(packed: Tensor, scale: Tensor) -> Tensor:
    """Return weights, [out, in] in the scales' dtype, of uint8 [out, in / 2] and scales [out, in / 64]."""
    weights: Tensor = torch.ops.fsdpbench_workloads.dequantise_4bit(packed, scale)
    return weights


def quantise(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the nearest levels of `weight`, [out, in], packed, and their scales in `dtype`."""
    blocks = weight.detach().float().view(len(weight), -1, block_of(weight.shape[1]))
    scale = blocks.abs().amax(dim=-1).clamp_min(1e-12).to(dtype)
    levels = torch.tensor(LEVELS, device=weight.device)
    halfway = (levels[1:] + levels[:-1]) / 2
    numbers = torch.bucketize(blocks / scale.float()[..., None], halfway).view(len(weight), -1)
    return (numbers[:, ::2] * 16 + numbers[:, 1::2]).to(torch.uint8), scale


def block_of(inputs: int) -> int:
    """Return the weights that share a scale: 64, or fewer where rows are short.

    Raises:
        WorkloadError: a row does not divide into blocks of 8.
    """
    block = next((size for size in (BLOCK, 32, 16, 8) if inputs % size == 0), 0)
    if not block:
        raise WorkloadError(f"4-bit weights: a layer with {inputs} inputs does not divide into blocks of 8")
    return block


class FourBitProjection(Projection):
    """A frozen linear layer in 4 bits, made of `base`; scales and bias in `dtype`."""

    def __init__(self, base: Projection, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.std = base.in_features, base.out_features, base.std
        block = block_of(base.in_features)
        if base.weight.device.type in ("cpu", "cuda"):
            packed, scale = quantise(base.weight, dtype)
        else:
            packed = base.weight.new_empty((base.out_features, base.in_features // 2), dtype=torch.uint8)
            scale = base.weight.new_empty((base.out_features, base.in_features // block), dtype=dtype)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.weight_scale = nn.Parameter(scale, requires_grad=False)
        self.bias = base.bias

    def reset_parameters(self) -> None:
        """Draw levels evenly, and set the scale that gives them the layer's standard deviation."""
        reset_packed(self.weight, self.weight_scale, self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return four_bit_linear(x, self.weight, self.weight_scale, self.bias)


@torch.no_grad()
def reset_packed(packed: Tensor, scale: Tensor, std: float) -> None:
    """Draw levels in place, and set scales so that the weights have the standard deviation `std`."""
    local = getattr(packed, "_local_tensor", packed)  # a shard has random bytes of its own
    local.random_(0, 256)
    scale.fill_(std / _RMS)


def four_bit_linear(x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `F.linear` of x, [..., in], with weights in 4 bits."""
    y: Tensor = _FourBitLinear.apply(x, packed, scale)
    return y if bias is None else y + bias


class _FourBitLinear(torch.autograd.Function):
    """A linear function that keeps the packed weights for backward, not the dequantised ones."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
        """Return [..., out] of `x` [..., in] with packed 4-bit weights and their scales."""
        ctx.save_for_backward(packed, scale)
        return F.linear(x, dequantise(packed, scale))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        if not ctx.needs_input_grad[0]:
            return None, None, None
        return gradient @ dequantise(*ctx.saved_tensors), None, None


@dataclass(frozen=True)
class Lora:
    """A choice of adapters: their `rank`, `targets` (`all` linear layers of the blocks, those of `attention`,
    or names joined by +), the dtype of frozen parameters, and whether the blocks' frozen linear layers are
    in 4 bits."""

    rank: int
    targets: str = ALL
    frozen_dtype: torch.dtype = torch.bfloat16
    four_bit: bool = False

    def takes(self, name: str) -> bool:
        """Return whether the layer called `name` in a block gets an adapter."""
        if name in ROUTERS:
            return False
        if self.targets == ALL:
            return True
        return name in (ATTENTION_LAYERS if self.targets == ATTENTION else self.targets.split("+"))


class AdaptedProjection(Projection):
    """A frozen linear layer, [..., in] to [..., out], with an adapter beside it."""

    def __init__(self, base: Projection, lora: Lora) -> None:
        nn.Module.__init__(self)  # weight and bias are those of `base`
        self.in_features, self.out_features, self.std = base.in_features, base.out_features, base.std
        self.weight, self.bias = base.weight, base.bias
        self.weight_scale = base.weight_scale if isinstance(base, FourBitProjection) else None
        self.scale = _ALPHA_OF_RANK
        self.bias_share = 1.0
        self.lora_a = nn.Parameter(torch.empty(lora.rank, base.in_features, dtype=torch.float32))
        self.lora_b = nn.Parameter(torch.empty(base.out_features, lora.rank, dtype=torch.float32))
        self._reset_adapter()

    def reset_parameters(self) -> None:
        """Draw the frozen layer's weights, and set an adapter that changes nothing yet."""
        if self.weight_scale is None:
            super().reset_parameters()
        else:
            reset_packed(self.weight, self.weight_scale, self.std)
        self._reset_adapter()

    def _reset_adapter(self) -> None:
        nn.init.normal_(self.lora_a, std=1 / math.sqrt(self.in_features))
        nn.init.zeros_(self.lora_b)

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else held(self.bias)
        if bias is not None and self.bias_share != 1.0:  # the shares of several ranks are added up
            bias = bias * self.bias_share
        if self.weight_scale is None:
            base = F.linear(x, held(self.weight), bias)
        else:
            base = four_bit_linear(x, held(self.weight), held(self.weight_scale), bias)
        return base + F.linear(F.linear(x, held(self.lora_a)), held(self.lora_b)) * self.scale


def adapt(model: nn.Module, block_classes: tuple[type[nn.Module], ...], lora: Lora) -> None:
    """Freeze `model` and put adapters beside the linear layers of its blocks, in place."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(lora.frozen_dtype)
        parameter.requires_grad_(False)

    def frozen(name: str, layer: Projection) -> Projection:
        base = FourBitProjection(layer, lora.frozen_dtype) if lora.four_bit else layer
        return AdaptedProjection(base, lora) if lora.takes(name) else base

    replace_projections(model, block_classes, frozen)


class LoraWorkload(Workload):
    """A workload whose blocks have adapters; data and shape are those of the plain one.

    Raises:
        WorkloadError: the family does not say which layers its blocks have, or no layer has such a name.
    """

    def __init__(self, base: Workload, lora: Lora) -> None:
        if not isinstance(base, HasProducts):
            raise WorkloadError(
                f"lora: {base.name} is of the family {base.family}, for which adapters are not built; "
                "the families decoder, llama and gpt have them"
            )
        self.base, self.name, self.family = base, base.name, base.family
        self._lora = lora
        self._blocks = [base.products(layer) for layer in range(base.block_count)]
        names = {product.name for product in self._blocks[0]} - ROUTERS
        listed = ", ".join(sorted(names))
        if not any(lora.takes(name) for name in names):
            raise WorkloadError(
                f"lora_targets: {base.name} has no layer {lora.targets!r}; it has {listed}"
                "; all or attention select several"
            )
        if lora.four_bit:
            for product in self._four_bit_products():
                block_of(product.inputs)
        unknown = set() if lora.targets in (ALL, ATTENTION) else set(lora.targets.split("+")) - names
        if unknown:
            raise WorkloadError(f"lora_targets: {base.name} has no layer {min(unknown)!r}; it has {listed}")

    @property
    def adapter_parameters(self) -> int:
        """Return the number of trained parameters."""
        return sum(
            self._lora.rank * (product.inputs + product.outputs)
            for products in self._blocks
            for product in products
            if self._lora.takes(product.name)
        )

    @property
    def parameters(self) -> int:
        return self.base.parameters + self.adapter_parameters

    @property
    def training_state_bytes(self) -> int:
        """Return the bytes of the frozen parameters as stored, and 16 for each of an adapter's."""
        itemsize = self._lora.frozen_dtype.itemsize
        packed = self._four_bit_products() if self._lora.four_bit else []
        in_four_bits = sum(product.inputs * product.outputs for product in packed)
        scales = sum(product.inputs // block_of(product.inputs) * product.outputs for product in packed)
        others = self.base.parameters - in_four_bits
        return in_four_bits // 2 + (scales + others) * itemsize + TRAINING_BYTES * self.adapter_parameters

    def _four_bit_products(self) -> list[Product]:
        """Return the layers of all blocks that are in 4 bits."""
        return [each for products in self._blocks for each in products if each.name not in ROUTERS]

    @property
    def is_causal(self) -> bool:
        return self.base.is_causal

    @property
    def shape(self) -> dict[str, ShapeValue]:
        return self.base.shape

    @property
    def default_seq(self) -> int | None:
        return self.base.default_seq

    @property
    def block_classes(self) -> tuple[type[nn.Module], ...]:
        return self.base.block_classes

    def microbatches(self, feed: Feed, seq: int | None) -> Iterator[Batch]:
        # By `batches`: a family of another package may define that alone.
        return self.base.batches(
            feed.batch, seq, feed.seed, feed.rank, feed.device, feed.data, world_size=feed.world_size
        )

    def tokens(self, batch: int, seq: int | None = None) -> int | None:
        return self.base.tokens(batch, seq)

    def resolve_seq(self, seq: int | None) -> int | None:
        return self.base.resolve_seq(seq)

    def tensor_plan(self) -> TensorPlan:
        if not isinstance(self.base, HasTensorPlan):
            raise WorkloadError(f"the family {self.family} has no plan; decoder, gpt, llama and t5 have one")
        return self.base.tensor_plan()

    def build(self, activation_checkpointing: str = "none", seq: int | None = None) -> nn.Module:
        model = self.base.build(activation_checkpointing, seq)
        adapt(model, self.block_classes, self._lora)
        return model

    def forward_flops(self, batch: int, seq: int | None = None) -> ForwardFlops:
        """Return the FLOPs of the plain model and of the adapters, with products without gradients apart."""
        plain = self.base.forward_flops(batch, seq)
        (blocks,) = plain.stacks
        adapted, frozen, first, empty = [], plain.rest, 0, 0
        parallel = bool(self.shape.get("parallel"))
        learns = False  # whether the block's input depends on an adapter
        for layer, block in enumerate(blocks):
            walk = _Walk(self._lora, parallel, learns)
            adapted.append(walk.block(block, self._blocks[layer]))
            learns, frozen, first = walk.learns, frozen + walk.frozen, first + walk.first
            empty += block.empty * (2 if learns else 1)  # forward, and the gradient of the input
        return ForwardFlops([adapted], plain.rest, first, frozen, empty, plain.head)

    def buffer_rows(self, tokens: int) -> BufferRows | None:
        return self.base.buffer_rows(tokens) if isinstance(self.base, HasBuffers) else None


class _Walk:
    """A walk through one block's products and adapters in order, which counts FLOPs without gradients."""

    def __init__(self, lora: Lora, parallel: bool, learns: bool) -> None:
        self.lora, self.parallel, self.learns = lora, parallel, learns
        self.frozen = self.first = 0

    def block(self, block: BlockFlops, products: Sequence[Product]) -> BlockFlops:
        """Return the block's FLOPs with adapters; add to `frozen` and `first` as `ForwardFlops` has them."""
        entering, narrow, found = self.learns, False, []
        pairs = zip(products, block.products, strict=False)
        for stage, group in itertools.groupby(pairs, lambda pair: _STAGES[pair[0].name]):
            if stage == _MIXED and not self.learns:
                self.first += 2 * block.attention
            at_input = stage == _AT_INPUT or (stage == _NARROW and self.parallel)
            reading = entering if at_input else narrow if stage == _WIDE else self.learns
            for product, flops in group:
                found += self._product(product, flops, reading)
                narrow = stage == _NARROW and (narrow or reading or self.lora.takes(product.name))
        experts = block.products[len(products) :]
        others = sum(experts) + block.batched
        self.frozen += others
        self.first += 0 if self.learns else others
        return BlockFlops(
            (*found, *experts),
            block.attention,
            ends_needed=block.ends_needed,
            batched=block.batched,
            empty=block.empty,
        )

    def _product(self, product: Product, flops: int, reading: bool) -> list[int]:
        """Return the FLOPs of a product and its adapter's two; `reading`: its input depends on an adapter."""
        self.frozen += flops
        self.first += 0 if reading else flops
        if not self.lora.takes(product.name):
            return [flops]
        down, up = flops * self.lora.rank // product.outputs, flops * self.lora.rank // product.inputs
        self.first += 0 if reading else down
        self.learns = True
        return [flops, down, up]
