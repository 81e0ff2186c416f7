"""Low-rank adapters (LoRA; Hu et al. 2021, arXiv 2106.09685): small trained matrices on a frozen model.

    y = x W^T  +  (alpha / rank) (x A^T) B^T        W frozen, A of [rank, in] normal, B of [out, rank] zero

A layer keeps its name and its `weight` and gains `lora_a` and `lora_b`, so units and state dicts are those of
the plain model plus two entries. Frozen parameters have one dtype (usually bf16: 2 bytes each), adapters are
fp32 with gradient and AdamW's moments (16 bytes).

FLOPs: a frozen product costs its forward and its input's gradient, but no weight gradient. Layers before the
first adapter need no gradients at all.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from fsdpbench.base.configuration.config import ShapeValue
from fsdpbench.workloads import tensor_plan as plans
from fsdpbench.workloads.base import TRAINING_BYTES, BlockFlops, ForwardFlops, Workload
from fsdpbench.workloads.decoder.workload import BufferRows, HasBuffers
from fsdpbench.workloads.shape import DTYPE_BYTES, WorkloadError, error_text

if TYPE_CHECKING:
    from torch import nn

    from fsdpbench.workloads.inputs import Batch, Feed

ALL, ATTENTION = "all", "attention"
_AT_INPUT, _MIXED, _NARROW, _WIDE = range(4)
_STAGES = {
    **dict.fromkeys(("query", "key", "value", "query_key_value", "qkv"), _AT_INPUT),
    **dict.fromkeys(("output", "proj"), _MIXED),
    **dict.fromkeys(("gate", "up", "gate_up", "router", "shared_gate"), _NARROW),
    "down": _WIDE,
}
"""Inputs of a block's layers, in order: its own, attention's output, a norm of that, the hidden layer."""
BLOCK = 64


def block_of(inputs: int) -> int:
    """Return the number of weights that share a scale: 64, or fewer for short rows.

    Raises:
        WorkloadError: a row is not divisible into blocks of 8.
    """
    block = next((size for size in (BLOCK, 32, 16, 8) if inputs % size == 0), 0)
    if not block:
        raise WorkloadError(f"4-bit weights: a layer with {inputs} inputs does not divide into blocks of 8")
    return block


@dataclass(frozen=True)
class Lora:
    """Configuration of adapters: their `rank`, `targets` (`all` linear layers of the blocks, those of
    `attention`, or names joined by +), the dtype of frozen parameters, and whether frozen linear layers of
    the blocks are in 4 bits."""

    rank: int
    targets: str = ALL
    frozen_dtype: str = "bf16"
    four_bit: bool = False

    def takes(self, name: str) -> bool:
        """Return whether a block's layer called `name` gets an adapter."""
        if name in plans.ROUTERS:
            return False
        if self.targets == ALL:
            return True
        return name in (plans.ATTENTION_LAYERS if self.targets == ATTENTION else self.targets.split("+"))


class LoraWorkload(Workload):
    """A workload with adapters in its blocks; data and shape are those of the plain workload.

    Raises:
        WorkloadError: the family does not list the layers of its blocks, or no layer has such a name.
    """

    def __init__(self, base: Workload, lora: Lora) -> None:
        if not isinstance(base, plans.HasProducts):
            raise WorkloadError(error_text("lora.family", base.name, base.family))
        self.base, self.name, self.family = base, base.name, base.family
        self._lora = lora
        self._blocks = [base.products(layer) for layer in range(base.block_count)]
        names = {product.name for product in self._blocks[0]} - plans.ROUTERS
        listed = ", ".join(sorted(names))
        if not any(lora.takes(name) for name in names):
            raise WorkloadError(error_text("lora.targets", base.name, lora.targets, listed))
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
        """Return the bytes of frozen parameters as stored, plus 16 per adapter parameter."""
        itemsize = DTYPE_BYTES[self._lora.frozen_dtype]
        packed = self._four_bit_products() if self._lora.four_bit else []
        in_four_bits = sum(product.inputs * product.outputs for product in packed)
        scales = sum(product.inputs // block_of(product.inputs) * product.outputs for product in packed)
        others = self.base.parameters - in_four_bits
        return in_four_bits // 2 + (scales + others) * itemsize + TRAINING_BYTES * self.adapter_parameters

    def _four_bit_products(self) -> list[plans.Product]:
        """Return the layers of all blocks that are in 4 bits."""
        return [each for products in self._blocks for each in products if each.name not in plans.ROUTERS]

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
    def block_classes(self) -> "tuple[type[nn.Module], ...]":
        return self.base.block_classes

    def microbatches(self, feed: "Feed", seq: int | None) -> "Iterator[Batch]":
        # Uses `batches`, because a family of another package may define only that.
        return self.base.batches(
            feed.batch, seq, feed.seed, feed.rank, feed.device, feed.data, world_size=feed.world_size
        )

    def tokens(self, batch: int, seq: int | None = None) -> int | None:
        return self.base.tokens(batch, seq)

    def resolve_seq(self, seq: int | None) -> int | None:
        return self.base.resolve_seq(seq)

    def tensor_plan(self) -> plans.TensorPlan:
        if not isinstance(self.base, plans.HasTensorPlan):
            raise WorkloadError(f"the family {self.family} has no plan; decoder, gpt, llama and t5 have one")
        return self.base.tensor_plan()

    def build(self, activation_checkpointing: str = "none", seq: int | None = None) -> "nn.Module":
        model = self.base.build(activation_checkpointing, seq)
        import_module("fsdpbench.workloads.lora_layers").adapt(model, self.block_classes, self._lora)
        return model

    def forward_flops(self, batch: int, seq: int | None = None) -> ForwardFlops:
        """Return the FLOPs of the plain model and the adapters, counting products without gradients apart."""
        plain = self.base.forward_flops(batch, seq)
        (blocks,) = plain.stacks
        adapted, frozen, first, empty = [], plain.rest, 0, 0
        parallel = bool(self.shape.get("parallel"))
        learns = False  # whether the block's input depends on an adapter
        for layer, block in enumerate(blocks):
            walk = _Walk(self._lora, parallel, learns)
            adapted.append(walk.block(block, self._blocks[layer]))
            learns, frozen, first = walk.learns, frozen + walk.frozen, first + walk.first
            empty += block.empty * (2 if learns else 1)  # forward, and the input's gradient
        return ForwardFlops([adapted], plain.rest, first, frozen, empty, plain.head)

    def buffer_rows(self, tokens: int) -> BufferRows | None:
        return self.base.buffer_rows(tokens) if isinstance(self.base, HasBuffers) else None


class _Walk:
    """Iteration over one block's products and adapters in order, which counts FLOPs without gradients."""

    def __init__(self, lora: Lora, parallel: bool, learns: bool) -> None:
        self.lora, self.parallel, self.learns = lora, parallel, learns
        self.frozen = self.first = 0

    def block(self, block: BlockFlops, products: Sequence[plans.Product]) -> BlockFlops:
        """Return the block's FLOPs with adapters; update `frozen` and `first` (see `ForwardFlops`)."""
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

    def _product(self, product: plans.Product, flops: int, reading: bool) -> list[int]:
        """Return the FLOPs of a product and its adapter's two; `reading`: its input depends on adapters."""
        self.frozen += flops
        self.first += 0 if reading else flops
        if not self.lora.takes(product.name):
            return [flops]
        down, up = flops * self.lora.rank // product.outputs, flops * self.lora.rank // product.inputs
        self.first += 0 if reading else down
        self.learns = True
        return [flops, down, up]
