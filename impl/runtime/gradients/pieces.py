"""Reduce-scatters of a large unit's gradients, one piece after the other through one buffer.

A reduction in another dtype than the gradients' needs them cast, all of a unit at a time twice their memory
where bf16 becomes fp32. Of a unit of gigabytes that is most of what backward holds. Here the buffer has room
for one piece only, and is the reduce stream's own: the cast of a piece and the collective before it are in
one stream, so nothing waits for the memory::

    reduce   [cast a][reduce-scatter a][cast b][reduce-scatter b] ...      one buffer
    result    a1 | b1 | c1 d1                                              on rank 1

The gradients stay until all pieces are cast.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed import ProcessGroup

from ...collectives import comm
from ...shared.layout import UnitLayout
from ...shared.settings import UnitPrecision
from ...shared.torch_internals import chunk_cat
from ..unit import Unit

PIECE_BYTES = 1 << 30
"""What a piece has at least: it takes 5 ms or more between nodes, starting a collective up to 3."""


def pieces_of(layout: UnitLayout, precision: UnitPrecision, which: Sequence[int]) -> Sequence[range]:
    """How the gradients of the parameters ``which`` are divided, in their order; empty where one piece is
    all, or where nothing is gained (no cast) or a copy of its own is needed (not cut on dim 0).
    """
    if not layout.rank_major or layout.interleaved or precision.reduce == precision.compute:
        return ()
    pieces, start, nbytes = [], 0, 0
    for position, index in enumerate(which):
        numel = layout.segments[index].shard_padded_numel * layout.world_size
        nbytes += numel * precision.reduce.itemsize
        if nbytes >= PIECE_BYTES:
            pieces.append(range(start, position + 1))
            start, nbytes = position + 1, 0
    if pieces:
        pieces[-1] = range(pieces[-1].start, len(which))  # what is left is small
    return pieces if len(pieces) > 1 else ()


class PieceReduce:
    """One unit's reduction in ``pieces`` of its gradients; it holds them until they are cast."""

    def __init__(
        self, unit: Unit, which: Sequence[int], gradients: Sequence[torch.Tensor], pieces: Sequence[range]
    ) -> None:
        self._ranks = unit.layout.world_size
        self._gradients = gradients
        self._pieces = pieces
        self._sizes = [unit.layout.segments[index].shard_padded_numel for index in which]
        self.output = torch.empty(sum(self._sizes), dtype=unit.precision.reduce, device=unit.device)

    def start(self, group: ProcessGroup, operation: object, async_op: bool) -> None:
        """Cast and reduce piece by piece, on the current stream."""
        sizes = [sum(self._sizes[position] for position in piece) for piece in self._pieces]
        buffer = self.output.new_empty(max(sizes) * self._ranks)
        for piece, size, output in zip(self._pieces, sizes, self.output.split(sizes), strict=True):
            source = buffer[: size * self._ranks]
            gradients = list(self._gradients[piece.start : piece.stop])
            chunk_cat(gradients, 0, self._ranks, out=source.view(self._ranks, -1))
            comm.reduce_scatter(output, source, group, operation, async_op)
