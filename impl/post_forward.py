"""``reshard_after_forward`` as a group size: after forward keep a larger shard, gather it among fewer ranks
in backward.

With 8 ranks and a group size of 2, forward gathers among all 8, then each rank keeps one half of every
parameter instead of an eighth. Backward gathers among pairs, for instance inside a node, at the price of
memory::

    shard of 8 --all-gather 8--> full --keep--> shard of 2 --all-gather 2--> full --> backward

The kept shard is in the dtype of computation and lives from forward to backward only.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from .api import UnitPrecision
from .buffer import FlatBuffer
from .layout import UnitLayout, chunked_layout
from .streams import Lane, Mark


class SmallerGroup:
    """The larger shard of one unit and the layout of its gather.

    Args:
        layout: the unit's own layout, whose full buffer the parameters live in.
        group: the ranks that gather in backward; their number divides the unit's.
    """

    def __init__(self, layout: UnitLayout, group: ProcessGroup, precision: UnitPrecision) -> None:
        self.group = group
        shapes = [segment.shape for segment in layout.segments]
        self.layout = chunked_layout(shapes, group.size(), group.rank(), precision.compute.itemsize)
        self._starts = [segment.full_offset for segment in layout.segments]
        self.forget()

    def forget(self) -> None:
        """Start with new buffers, after the parameters were moved or converted."""
        self._kept: FlatBuffer | None = None
        self._gathered: FlatBuffer | None = None
        self._parts: list[torch.Tensor] = []
        self._copy_out: list[torch.Tensor] = []
        self.holds = False
        """Whether the larger shard is there, so that the next gather is the smaller one."""
        self.mark: Mark | None = None

    def keep(self, full: torch.Tensor, compute: Lane) -> None:
        """Copy this rank's part out of the full buffer, before that is freed."""
        layout = self.layout
        if self._kept is None:
            self._kept = FlatBuffer(layout.shard_numel, full.dtype, full.device, compute)
            for segment, start in zip(layout.segments, self._starts, strict=True):
                begin, end = segment.shard_range
                part = self._kept.tensor[segment.shard_offset : segment.shard_offset + end - begin]
                self._parts += [part, full[start + begin : start + end]]
                rows = full[start : start + segment.shard_padded_numel * layout.world_size]
                self._copy_out.append(rows.view(layout.world_size, -1))
        else:
            self._kept.take()
        torch._foreach_copy_(self._parts[::2], self._parts[1::2])
        self.mark = compute.record()
        self.holds = True

    @property
    def shard(self) -> torch.Tensor:
        """1-D, what this rank gives to the gather."""
        assert self._kept is not None
        return self._kept.tensor

    def take_gathered(self, owner: Lane) -> FlatBuffer:
        """The buffer to gather into; the caller is on ``owner``."""
        if self._gathered is None:
            numel = self.layout.gathered_numel
            self._gathered = FlatBuffer(numel, self.shard.dtype, self.shard.device, owner)
        else:
            self._gathered.take()
        return self._gathered

    def copy_out(self, gathered: torch.Tensor) -> None:
        """Fill the full buffer from what was gathered."""
        rows = gathered.view(self.layout.world_size, -1)
        torch.split_with_sizes_copy(rows, self.layout.split_sizes, dim=1, out=self._copy_out)

    def drop(self) -> None:
        """Free the larger shard."""
        if self._kept is not None:
            self._kept.free()
        self.holds = False


_groups: dict[tuple[ProcessGroup, int], ProcessGroup] = {}
"""Groups made here, so that all units of one process group share them."""


def neighbours(group: ProcessGroup, size: int) -> ProcessGroup:
    """This rank's group of ``size`` neighbours in ``group``. The first call for a size is collective."""
    key = (group, size)
    if key not in _groups:
        ranks = dist.get_process_group_ranks(group)
        own = dist.get_rank(group) // size
        members = ranks[own * size : (own + 1) * size]
        _groups[key] = dist.new_group(members, use_local_synchronization=True)
    return _groups[key]
