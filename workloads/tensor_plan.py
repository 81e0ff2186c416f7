"""Layers of a model by name: products with weights, and how tensor parallelism shards them.

This module does not use torch.distributed: `fsdpbench.systems.parallel` turns the plan into torch's.

Between blocks each rank has a part of the sequence. Inside attention and feed-forward it has the whole
sequence, but only some of the heads and hidden features:

    x [batch, seq/tp, d]  -> norm -> all-gather -> columns -> attention of heads/tp -> rows -> reduce-scatter

A mixture of experts is not sharded: router, shared expert and experts work on a rank's part of the sequence,
and their gradients are summed. Expert parallelism can distribute the experts over the same ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from fsdpbench.workloads.shape import WorkloadError, error_text

ATTENTION_LAYERS = frozenset({"query", "key", "value", "query_key_value", "output", "qkv", "proj"})
"""Names of attention's linear layers in all families."""
ROUTERS = frozenset({"router", "shared_gate"})
"""Names of layers that weigh experts; they stay unchanged when other layers are replaced."""


@dataclass(frozen=True)
class Product:
    """A linear layer: its `name` in the block, and the widths of its input and output."""

    name: str
    inputs: int
    outputs: int


@runtime_checkable
class HasProducts(Protocol):
    """A workload with one stack of blocks that lists the linear layers of each block."""

    @property
    def block_count(self) -> int:
        """Return the number of blocks."""

    def products(self, layer: int) -> list[Product]:
        """Return the linear layers of block `layer` in execution order, without those of experts."""


@dataclass(frozen=True)
class BlockPlan:
    """Layers of one block, by their names in it.

    Fields: `readers`: modules whose first argument must be the whole sequence; `columns`: layers sharded by
    outputs, with the widths of their concatenated results (a rank gets a part of each); `rows`: linear layers
    sharded by inputs; `norms`: norms on a part of the sequence; `head_norms`: norms on a rank's heads;
    `by_head`: parameters with one element per head; `by_token`: linear layers on [tokens, features] of a
    rank's part of the sequence; `whole`: replicated modules that use local parts of their parameters.
    """

    readers: tuple[str, ...]
    columns: Mapping[str, tuple[int, ...]]
    rows: tuple[str, ...]
    norms: tuple[str, ...]
    head_norms: tuple[str, ...] = ()
    by_head: tuple[str, ...] = ()
    by_token: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()


@dataclass(frozen=True)
class TensorPlan:
    """Plan of a transformer: its `blocks` (block i uses plan i modulo their number), embeddings with the
    sequence dimension of their output, the norms after the last blocks, the lm head, and whether head and
    first embedding are one parameter.

    `divides`: numbers of the shape that the ranks must divide; `columns`: embeddings outside the blocks that
    are sharded by features; `gathered`: modules whose sharded result is gathered for later modules.
    """

    blocks: tuple[BlockPlan, ...]
    embeddings: Mapping[str, int]
    final_norms: tuple[str, ...]
    head: str
    tied: bool
    divides: Mapping[str, int] = field(default_factory=dict)
    columns: tuple[str, ...] = ()
    gathered: tuple[str, ...] = ()

    def of(self, index: int) -> BlockPlan:
        """Return the plan of block number `index`."""
        return self.blocks[index % len(self.blocks)]

    def check(self, ranks: int, name: str) -> None:
        """Raise `WorkloadError` if a number of the shape of model `name` is not divisible by `ranks`."""
        for part, number in self.divides.items():
            if number % ranks:
                fits = [str(n) for n in range(2, ranks) if not any(d % n for d in self.divides.values())]
                instead = f"use {' or '.join(fits)}" if fits else "leave it at 1"
                raise WorkloadError(
                    error_text("tensor_plan.uneven", name, part, number, ranks, instead, part)
                )


@runtime_checkable
class HasTensorPlan(Protocol):
    """A workload that defines how tensor parallelism shards it."""

    def tensor_plan(self) -> TensorPlan:
        """Return the plan.

        Raises:
            WorkloadError: a part of this shape cannot be cut; the message names it.
        """
