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
        at_shard = unit.groups.shard is None
        starts = [s.shard_offset if at_shard else s.full_offset for s in layout.segments]
        return [
            gathered[start : start + s.numel].view(s.shape)
            for start, s in zip(starts, layout.segments, strict=True)
        ]
    full = gathered.new_empty(layout.full_numel)
    CopyOut(layout, full)(gathered)
    return [full[s.full_offset : s.full_offset + s.numel].view(s.shape) for s in layout.segments]


def full_parameters(unit: Unit) -> list[torch.Tensor]:
    """The unit's parameters, whole and in the dtype of its shard, in the order of its layout. A
    collective.
    """
    return split_full(unit, gather_flat(unit, unit.shard))


@torch.no_grad()
def write_back(unit: Unit, values: Sequence[torch.Tensor]) -> None:
    """Store this rank's part of whole ``values`` in the shard."""
    for segment, value in zip(unit.layout.segments, values, strict=True):
        start, end = segment.shard_range
        part = value.detach().reshape(-1)[start:end]
        unit.shard[segment.shard_offset : segment.shard_offset + end - start].copy_(part)
