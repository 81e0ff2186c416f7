"""What tensor parallelism cuts in a model, in the words of the model: names of its layers, nothing of torch's
distributed parts. `fsdpbench.systems.parallel` makes torch's plan of it.

Between blocks every rank holds its share of the sequence; inside attention and feed-forward it holds all of
the sequence and its share of heads and hidden features:

    x [batch, seq/tp, d]  -> norm -> all-gather -> columns -> attention of heads/tp -> rows -> reduce-scatter

A mixture of experts is not cut: router, shared expert and experts work on a rank's share of the sequence, and
their gradients are summed; experts may be shared by expert parallelism, over the same ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn


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
    """A transformer's: its `blocks` (the first block has the first plan, and so on, round and round),
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
        """That of block number `index`."""
        return self.blocks[index % len(self.blocks)]

    def check(self, ranks: int, name: str) -> None:
        """Raises: WorkloadError, a number of the shape of model `name` does not divide by `ranks`."""
        for part, number in self.divides.items():
            if number % ranks:
                fits = [str(n) for n in range(2, ranks) if not any(d % n for d in self.divides.values())]
                instead = f"use {' or '.join(fits)}" if fits else "leave it at 1"
                raise WorkloadError(
                    f"{name} has {part}={number}, which {ranks} ranks cannot share evenly: {instead}, or "
                    f"change the shape's {part}"
                )


@runtime_checkable
class HasTensorPlan(Protocol):
    """A workload that says how tensor parallelism cuts it."""

    def tensor_plan(self) -> TensorPlan:
        """Raises: WorkloadError, a part of this shape cannot be cut; the message names it."""


class BlockGroup(nn.Sequential):
    """Consecutive blocks as one module; what follows the first argument is given to each of them."""

    def forward(self, x: Tensor, *context: Any) -> Tensor:
        for block in self:
            x = block(x, *context)
        return x


def group_blocks(model: nn.Module, count: int) -> None:
    """Replace each list of blocks in `model` (a `ModuleList` called `blocks`) by groups of `count`, in place.

    The last group holds what is left. `blocks.5` of 2 a group becomes `blocks.2.1`; parameters, results and
    checkpointing stay as they are.

    Raises:
        WorkloadError: `count` is below 1, or the model has no list of blocks.
    """
    if count < 1:
        raise WorkloadError(f"blocks cannot be grouped by {count}: at least 1 makes a group")
    found = False
    for module in list(model.modules()):
        blocks = getattr(module, "blocks", None)
        if isinstance(blocks, nn.ModuleList):
            found = True
            parts = list(blocks)
            groups = (BlockGroup(*parts[start : start + count]) for start in range(0, len(parts), count))
            module.blocks = nn.ModuleList(groups)
    if not found:
        raise WorkloadError(f"{type(model).__name__} has no list of blocks to group")


class WorkloadError(ValueError):
    """Something that the user asked of a workload cannot be had; the message says what to ask instead."""


class UnknownModelError(WorkloadError):
    """No model has this name. `nearest` holds the names that look like it."""

    def __init__(self, name: str, nearest: Sequence[str], known: Sequence[str]) -> None:
        hint = f"did you mean {' or '.join(nearest)}?" if nearest else f"known models: {', '.join(known)}"
        super().__init__(f"unknown model '{name}': {hint}")
        self.name = name
        self.nearest = tuple(nearest)


class ShapeError(WorkloadError):
    """A shape has an unknown, a missing or an impossible field."""


class PluginError(WorkloadError):
    """A package that offers a family of models cannot be loaded, or offers something else."""


class DataError(WorkloadError):
    """The file or folder given as input data cannot be used."""
