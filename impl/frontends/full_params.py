"""Whole parameters in full precision, outside of training: for looking at them, changing them and saving
them.

Training gathers in the dtype of computation into memory that is freed with the unit. Here the shards
themselves are gathered into memory of its own, one unit at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..collectives import comm
from ..runtime.unit import Unit
from ..shared.copy_out import CopyOut


@torch.no_grad()
def gather_flat(unit: Unit, shard: torch.Tensor) -> torch.Tensor:
    """All ranks' ``shard`` (1-D, equal sizes) one after another; the shard itself where nothing is sharded.

    A collective over the unit's shard group: every rank has to call it.
    """
    group = unit.groups.shard
    if group is None:
        return shard if shard.device == unit.device else shard.to(unit.device)
    gathered = torch.empty(unit.layout.gathered_numel, dtype=shard.dtype, device=unit.device)
    comm.all_gather(gathered, shard.detach().to(unit.device).contiguous(), group, async_op=False)
    return gathered


def split_full(unit: Unit, gathered: torch.Tensor) -> list[torch.Tensor]:
    """Each parameter's whole values out of what ``gather_flat`` returned; views where the layout allows
    it.
    """
    layout = unit.layout
    if not layout.rank_major:
        if unit.groups.shard is None:
            return [segment.in_shard(gathered).view(segment.shape) for segment in layout.segments]
        return [segment.in_full(gathered) for segment in layout.segments]
    full = gathered.new_empty(layout.full_numel)
    CopyOut(layout, full)(gathered)
    return [segment.in_full(full) for segment in layout.segments]


def write_back(unit: Unit, values: Sequence[torch.Tensor]) -> None:
    """Store this rank's part of whole ``values`` in the shard."""
    for segment, value in zip(unit.layout.segments, values, strict=True):
        segment.store(value, unit.shard)
