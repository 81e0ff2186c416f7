"""Blocks of a model: activation checkpointing of each, and groups of blocks as one FSDP unit.

A checkpointed block keeps its input and recomputes its activations in backward.

The block calls the checkpoint itself, inside its `forward`:

    FSDP hooks of the unit > CheckpointedBlock.forward > checkpoint > transform: attention, feed-forward

So no wrapper module changes names or classes, and the hooks outside the checkpoint issue a unit's all-gather
once; the recomputation inside does not repeat it.

A recomputation stops as soon as backward has all that it needs, which is the default of torch's checkpoint
since 2.1: it omits a GPT block's last matrix product, a third of the block's FLOPs. (The usual formula for
HFU, 4/3, counts it.) It stops by an exception, so post-forward hooks of FSDP units nested in the block may
not run in the recomputation; their parameters stay unsharded until their own backward has used them.
"""

import itertools
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fsdpbench.workloads.checkpointing import ATTENTION, PRODUCTS, ActivationCheckpointing
from fsdpbench.workloads.shape import WorkloadError


def _operators(names: tuple[str, ...]) -> frozenset[Any]:
    """Return the aten operators with these names, as far as this version of torch has them."""
    return frozenset(getattr(torch.ops.aten, name).default for name in names if hasattr(torch.ops.aten, name))


_PRODUCT_OPERATORS = _operators(PRODUCTS)
_ATTENTION_OPERATORS = _operators(ATTENTION)


class CheckpointedBlock(nn.Module):
    """A block of a model, the natural FSDP unit. `transform` is its computation; `forward` runs it directly
    or checkpointed.

    Args:
        checkpointing: the model's setting.
        index: the number of the block in its stack.
    """

    def __init__(self, checkpointing: ActivationCheckpointing, index: int) -> None:
        super().__init__()
        self.checkpointed = checkpointing.applies_to(index)
        self.checkpointing = checkpointing.of_block(index)
        self.random = False

    def forward(self, x: Tensor, *context: Any) -> Tensor:
        if self.checkpointed and torch.is_grad_enabled():
            return run_checkpointed(
                self.transform, x, *context, checkpointing=self.checkpointing, random=self.random
            )
        return self.transform(x, *context)

    @abstractmethod
    def transform(self, x: Tensor, *context: Any) -> Tensor:
        """Compute the block; `context` is the same for all blocks of a stack."""


def run_checkpointed(
    function: Callable[..., Tensor], *args: Any, checkpointing: ActivationCheckpointing, random: bool = False
) -> Tensor:
    """Run `function`, keeping only its arguments (and outputs of operators that `checkpointing` selects).
    Backward recomputes whatever else it needs.

    `random`: the function draws random numbers (dropout) and must draw the same again, so keep their state.
    """
    selection: dict[str, Any] = {}
    if checkpointing.by_operator:
        selection["context_fn"] = partial(_selection, checkpointing)
    output: Tensor = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=random, **selection)
    return output


def _selection(checkpointing: ActivationCheckpointing) -> tuple[Any, Any]:
    """Return torch's contexts for forward and recomputation of one call, each with its own count."""
    products = {False: 0, True: 0}

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator in _PRODUCT_OPERATORS:
            index = products[context.is_recompute]
            products[context.is_recompute] += 1
            keep = checkpointing.keeps_product(index)
        else:
            keep = operator in _ATTENTION_OPERATORS
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class BlockGroup(nn.Sequential):
    """Consecutive blocks as one module; each receives all arguments after the first."""

    def forward(self, x: Tensor, *context: Any) -> Tensor:
        for block in self:
            x = block(x, *context)
        return x


def group_blocks(model: nn.Module, count: int | Sequence[int]) -> None:
    """Replace each list of blocks in `model` (a `ModuleList` called `blocks`) by groups of `count`, in place.

    The last group holds the remaining blocks. A sequence `count` lists the sizes of successive groups. With 2
    per group, `blocks.5` becomes `blocks.2.1`; parameters, results and checkpointing do not change.

    Raises:
        WorkloadError: `count` is below 1, or the model has no list of blocks.
    """
    sizes = itertools.repeat(count) if isinstance(count, int) else iter(count)
    if isinstance(count, int) and count < 1:
        raise WorkloadError(f"blocks cannot be grouped by {count}: at least 1 makes a group")
    found = False
    for module in list(model.modules()):
        blocks = getattr(module, "blocks", None)
        if isinstance(blocks, nn.ModuleList):
            found = True
            parts, groups = list(blocks), []
            while parts:
                size = next(sizes, len(parts))
                groups.append(BlockGroup(*parts[:size]))
                del parts[:size]
            module.blocks = nn.ModuleList(groups)
    if not found:
        raise WorkloadError(f"{type(model).__name__} has no list of blocks to group")
