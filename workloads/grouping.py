"""Blocks regrouped so that several of them make one FSDP unit."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fsdpbench.workloads.errors import WorkloadError


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
