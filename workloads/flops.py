"""FLOPs of a model's forward pass, block by block, and of a training step.

Only matrix products, convolutions and attention count; their backward costs twice the forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdpbench.workloads.checkpointing import ActivationCheckpointing


@dataclass(frozen=True)
class Flops:
    """Floating point operations of one forward and backward pass of one rank's microbatch.

    `model` is what MFU counts (forward + 2 x backward, no recomputation), `hardware` what HFU counts
    (`model` + what activation checkpointing computes again).
    """

    model: int
    hardware: int


@dataclass(frozen=True)
class BlockFlops:
    """The forward pass of one block that checkpointing applies to or not.

    Fields: `products`: of each product with weights, in the order in which they run; `attention`: products
    of activations with each other; `ends_needed`: backward needs what the last product gave (a norm or
    dropout follows it), so a recomputation has to make it again; `batched`: products with the weights of
    several experts at the same time, which checkpointing by operator keeps, as it keeps attention's; `empty`:
    of these, what is computed for places of buffers that hold no row.
    """

    products: tuple[int, ...]
    attention: int = 0
    ends_needed: bool = False
    batched: int = 0
    empty: int = 0

    @property
    def total(self) -> int:
        """Return the FLOPs of the whole block."""
        return sum(self.products) + self.attention + self.batched

    def recomputed(self, checkpointing: ActivationCheckpointing, in_full: bool) -> int:
        """Return the FLOPs that a checkpointed block computes again; `in_full`: also those of no use."""
        again = sum(
            flops for index, flops in enumerate(self.products) if not checkpointing.keeps_product(index)
        )
        last = len(self.products) - 1
        if not (in_full or self.ends_needed or checkpointing.keeps_product(last)):
            again -= self.products[last]
        return again if checkpointing.by_operator else again + self.attention + self.batched


@dataclass(frozen=True)
class ForwardFlops:
    """A model's forward pass over one microbatch.

    Fields: `stacks`: the blocks, in stacks that checkpointing counts one by one; `rest`: what is outside of
    them; `first`: of all, products whose input needs no gradient; `frozen`: products whose weight needs none;
    `empty`: forward and backward of places of experts' buffers that hold no row, which no model needs;
    `head`: of `rest`, the product that gives a token model's logits.
    """

    stacks: Sequence[Sequence[BlockFlops]]
    rest: int
    first: int = 0
    frozen: int = 0
    empty: int = 0
    head: int = 0

    def training(self, checkpointing: ActivationCheckpointing, in_full: bool = False) -> Flops:
        """Return the FLOPs of forward and backward. `in_full`: checkpoints recompute also what backward does
        not need, as they did before torch 2.1, and as formulas for HFU have it."""
        forward = sum(block.total for stack in self.stacks for block in stack) + self.rest
        computed = 3 * forward - self.first - self.frozen
        again = self.head if checkpointing.head else 0
        for stack in self.stacks:
            again += sum(
                block.recomputed(checkpointing.of_block(index), in_full)
                for index, block in enumerate(stack)
                if checkpointing.applies_to(index)
            )
            checkpointing = checkpointing.after(len(stack))
        return Flops(model=computed - self.empty, hardware=computed + again)
