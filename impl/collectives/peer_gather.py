"""On a gloo group of few ranks: only what the peers send passes through a buffer on its way to parameters.

gloo's own all-gather fills memory of its own and copies it out, this rank's part included; out of that the
fused copy (``copy_out.py``) makes parameters. Here each rank broadcasts its shard, and while that is under
way this rank's part goes to where it is computed with::

    shard of rank 1     a1 b1 ──────────────copy───────────────> full: a0 a1 a2  b0 b1 b2
    buffer              a0 b0 | a2 b2   (of ranks 0 and 2) ──────────> ^     ^   ^     ^
"""

from __future__ import annotations

import torch
from torch.distributed import ProcessGroup

from ..shared.copy_out import places
from ..shared.layout import UnitLayout
from ..shared.torch_internals import foreach_copy_
from . import comm


class PeerGather:
    """The all-gather of one unit whose layout is chunked on dim 0."""

    def __init__(self, layout: UnitLayout, group: ProcessGroup) -> None:
        self._layout = layout
        self._group = group
        self._received: torch.Tensor | None = None

    def start(self, full: torch.Tensor, shard: torch.Tensor) -> comm.Works:
        """Gather ``shard`` of every rank; ``full`` and ``shard`` are the unit's flat buffers."""
        layout = self._layout
        mine = layout.rank
        self._received = received = shard.new_empty(layout.world_size - 1, layout.shard_numel)
        works = comm.gather_by_broadcasts(
            [*received[:mine].unbind(), shard, *received[mine:].unbind()], self._group
        )
        parts = shard.split([segment.shard_padded_numel for segment in layout.segments])
        foreach_copy_([whole[mine] for whole in places(layout, full)], parts)
        return works

    def copy_out(self, full: torch.Tensor) -> None:
        """After the gather: what the peers sent, to its places."""
        received, mine = self._received, self._layout.rank
        assert received is not None
        wholes = places(self._layout, full)
        for rows, out in (
            (received[:mine], [whole[:mine] for whole in wholes]),
            (received[mine:], [whole[mine + 1 :] for whole in wholes]),
        ):
            if len(rows):
                torch.split_with_sizes_copy(rows, self._layout.split_sizes, dim=1, out=out)
        self._received = None
