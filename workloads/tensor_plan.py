"""The layers of a model by name: products with weights, and how tensor parallelism cuts them.

Nothing here knows torch's distributed parts: `fsdpbench.systems.parallel` makes torch's plan of it.

Between blocks every rank holds its share of the sequence; inside attention and feed-forward it holds all of
the sequence and its share of heads and hidden features:

    x [batch, seq/tp, d]  -> norm -> all-gather -> columns -> attention of heads/tp -> rows -> reduce-scatter

A mixture of experts is not cut: router, shared expert and experts work on a rank's share of the sequence, and
their gradients are summed; experts may be shared by expert parallelism, over the same ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from fsdpbench.workloads.shape import WorkloadError, error_text

ATTENTION_LAYERS = frozenset({"query", "key", "value", "query_key_value", "output", "qkv", "proj"})
"""Names of the linear layers of attention, in all families."""
ROUTERS = frozenset({"router", "shared_gate"})
"""Names of the layers that weigh experts: they stay as they are where other layers are replaced."""


@dataclass(frozen=True)
class Product:
    """A linear layer by its `name` in its block, with the widths of its input and output."""

    name: str
    inputs: int
    outputs: int


@runtime_checkable
class HasProducts(Protocol):
    """A workload of one stack of blocks that names the linear layers of each."""

    @property
    def block_count(self) -> int:
        """Return the number of blocks."""

    def products(self, layer: int) -> list[Product]:
        """Return the linear layers of block `layer` in the order in which they run (without experts)."""


@dataclass(frozen=True)
class BlockPlan:
    """The layers of one block by their names in it.

    Fields: `readers`: modules that read the whole sequence in their first argument; `columns`: layers
    cut by outputs, with the widths of what they compute side by side (a rank gets its share of each); `rows`:
    linear layers cut by inputs; `norms`: on the shares of the sequence; `head_norms`: on a rank's heads;
    `by_head`: parameters with an element a head; `by_token`: linear layers on [tokens, features] of a rank's
    share of the sequence; `whole`: modules that a rank has in full and that use their parameters' own parts.
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
    """The plan of a transformer: its `blocks` (the first block has the first plan, and so on, cyclically),
    embeddings with the dimension of their output that is the sequence, the norms after the last blocks and
    the lm head, and whether head and first embedding are one parameter.

    `divides`: numbers of the shape that the ranks must divide; `columns`: lookups outside the blocks that are
    cut by features; `gathered`: modules whose result, a share of the sequence, later ones read as a whole.
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
        """Raise `WorkloadError` if a number of the shape of model `name` does not divide by `ranks`."""
        for part, number in self.divides.items():
            if number % ranks:
                fits = [str(n) for n in range(2, ranks) if not any(d % n for d in self.divides.values())]
                instead = f"use {' or '.join(fits)}" if fits else "leave it at 1"
                raise WorkloadError(
                    error_text("tensor_plan.uneven", name, part, number, ranks, instead, part)
                )


@runtime_checkable
class HasTensorPlan(Protocol):
    """A workload that says how tensor parallelism cuts it."""

    def tensor_plan(self) -> TensorPlan:
        """Return the plan.

        Raises:
            WorkloadError: a part of this shape cannot be cut; the message names it.
        """
