"""Temporarily unsharded parameters of ``FullyShardedDataParallel``: ``summon_full_params``, full state dicts.

Each unit is gathered in full precision into new memory and shown instead of the sharded parameters. After
that, this rank's part is written back and the memory is freed.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..collectives import comm
from ..runtime.unit import Unit
from ..shared.layout import CopyOut
from .flat_param import FlatPresentation
from .original_params import OriginalPresentation


class ShownUnit:
    """One unit whose full parameters are shown between ``show`` and ``hide``.

    Args:
        keep: whether this rank keeps the values; otherwise it only takes part in the gather.
        offload: whether to move the values to the CPU.
    """

    def __init__(self, unit: Unit, *, keep: bool = True, offload: bool = False) -> None:
        self._unit = unit
        self._keep = keep
        self._offload = offload
        self._with_grads = False
        self._shown: list[nn.Parameter] = []
        presentation = unit.presentation
        assert isinstance(presentation, (FlatPresentation, OriginalPresentation))
        self._presentation = presentation

    @torch.no_grad()
    def show(self, with_grads: bool = False) -> None:
        """Gather and show the full parameters. Collective over the unit's shard group."""
        unit = self._unit
        unit.reshard_by_hand()
        unit.take_up_changes()
        values = self._gather(unit.shard)
        gradients = self._gather_gradients() if with_grads else None
        self._with_grads = with_grads
        if self._keep:
            self.show_values(values, gradients)

    def _gather_gradients(self) -> list[torch.Tensor | None]:
        """Return full gradients, ``None`` for parameters without a gradient on any rank."""
        unit = self._unit
        given = torch.tensor(self._presentation.which_gradients(), dtype=torch.int32, device=unit.device)
        if unit.groups.shard is not None:
            # A rank may hold no elements of a parameter that has a gradient on others: all gather, or none.
            dist.all_reduce(given, dist.ReduceOp.MAX, unit.groups.shard)
        which = [bool(each) for each in given.tolist()]
        if not any(which):
            return [None] * len(which)
        flat = self._presentation.flat_gradient()
        whole = self._gather(torch.zeros_like(unit.shard) if flat is None else flat)
        return [value if here else None for value, here in zip(whole, which, strict=bool(whole))]

    def show_values(
        self, values: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None] | None = None
    ) -> None:
        """Show given tensors in the shapes of the full parameters, without communication."""
        self._unit.reshard_by_hand()
        self._shown = self._presentation.show_full(values, gradients)

    def _gather(self, shard: torch.Tensor) -> list[torch.Tensor]:
        gathered = gather_flat(self._unit, shard)
        if not self._keep:
            return []
        if gathered is shard:
            gathered = shard.clone()  # not sharded: the shown values must not share memory with the shard
        if self._offload:
            gathered = gathered.cpu()
        return split_full(self._unit, gathered)

    @torch.no_grad()
    def hide(self, writeback: bool) -> None:
        """Show the sharded parameters again. If ``writeback``, first store this rank's part of the values
        (and of shown gradients)."""
        if not self._shown:
            return
        values: Any = self._shown
        if writeback:
            self._unit.layout.store([value.data for value in values], self._unit.shard)
            if self._with_grads:
                self._presentation.keep_gradients([value.grad for value in values])
        self._presentation.hide_full()
        self._shown = []


@torch.no_grad()
def gather_flat(unit: Unit, shard: torch.Tensor) -> torch.Tensor:
    """All-gather the ``shard`` (1-D, equal sizes) of all ranks; return the shard itself if not sharded.

    Collective over the unit's shard group.
    """
    group = unit.groups.shard
    if group is None:
        return shard if shard.device == unit.device else shard.to(unit.device)
    gathered = torch.empty(unit.layout.gathered_numel, dtype=shard.dtype, device=unit.device)
    comm.all_gather(gathered, shard.detach().to(unit.device).contiguous(), group, async_op=False)
    return gathered


def split_full(unit: Unit, gathered: torch.Tensor) -> list[torch.Tensor]:
    """Split the output of ``gather_flat`` into full parameters; views if possible."""
    layout = unit.layout
    if not layout.rank_major:
        if unit.groups.shard is None:
            return [segment.in_shard(gathered).view(segment.shape) for segment in layout.segments]
        return [segment.in_full(gathered) for segment in layout.segments]
    full = gathered.new_empty(layout.full_numel)
    CopyOut(layout, full)(gathered)
    return [segment.in_full(full) for segment in layout.segments]
