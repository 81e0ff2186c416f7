"""On a gloo group of few ranks: large parameters are gathered to where they are computed with.

gloo's own all-gather fills memory of its own and copies it out, and what is gathered rank by rank has to be
copied once more into parameters. But rank r's rows of one parameter are one piece of it, so a broadcast by r
can end there. A broadcast has its own price, so small parameters still travel together::

    shard of rank r      w0 (large)   b0 c0 (small)   w1 (large)
                           |             |  |            |
    full buffer          w0: r's rows    |  |          w1: r's rows      a broadcast a rank, for each of them
    row r of a buffer                  [b0 c0] ──copy──> b0, c0          a broadcast a rank, for all of them
"""

from __future__ import annotations

import torch
from torch.distributed import ProcessGroup

from . import comm
from .layout import Segment, UnitLayout

LARGE_BYTES = 1 << 18
"""A rank's rows of this size are sooner broadcast than copied."""


class DirectGather:
    """The all-gather of one unit whose layout is chunked on dim 0.

    Args:
        itemsize: bytes of an element that is gathered.
    """

    def __init__(self, layout: UnitLayout, group: ProcessGroup, itemsize: int) -> None:
        self._layout = layout
        self._group = group
        segments = layout.segments
        self._large = [s for s in segments if s.shard_padded_numel * itemsize >= LARGE_BYTES]
        self._small = [s for s in segments if s.shard_padded_numel * itemsize < LARGE_BYTES]
        self._rows: torch.Tensor | None = None

    @property
    def worthwhile(self) -> bool:
        """Whether anything is gathered to its own place."""
        return bool(self._large)

    def start(self, full: torch.Tensor, shard: torch.Tensor) -> comm.Works:
        """Gather ``shard`` of every rank; ``full`` and ``shard`` are the unit's flat buffers."""
        mine = self._layout.rank
        pieces = [(self._part(shard, s), self._places(full, s)) for s in self._large]
        if self._small:
            own = torch.cat([self._part(shard, s) for s in self._small])
            self._rows = own.new_empty(self._layout.world_size, own.numel())
            pieces.append((own, list(self._rows.unbind())))
        works = comm.gather_pieces(pieces, self._group)
        torch._foreach_copy_([places[mine] for _, places in pieces], [part for part, _ in pieces])
        return works

    def copy_out(self, full: torch.Tensor) -> None:
        """After the gather: the small parameters to their places."""
        if self._rows is None:
            return
        sizes = [s.shard_padded_numel for s in self._small]
        torch.split_with_sizes_copy(self._rows, sizes, dim=1, out=[self._whole(full, s) for s in self._small])
        self._rows = None

    @staticmethod
    def _part(shard: torch.Tensor, segment: Segment) -> torch.Tensor:
        return shard[segment.shard_offset : segment.shard_offset + segment.shard_padded_numel]

    def _whole(self, full: torch.Tensor, segment: Segment) -> torch.Tensor:
        whole = full[segment.full_offset : segment.full_offset + segment.full_padded_numel]
        return whole.view(self._layout.world_size, -1)

    def _places(self, full: torch.Tensor, segment: Segment) -> list[torch.Tensor]:
        return list(self._whole(full, segment).unbind())
