"""From a unit's flat shards to rows of its parameters and back, without gathering the unit.

A flat shard ends wherever it ends; a sharded state dict wants rows, as ``torch.chunk`` cuts them. Here for
two parameters a (3 x 2) and b (4) on two ranks::

    flat shards    a0 a1 a2 a3 a4       | a5 b0 b1 b2 b3
    rows           a0 a1 a2 a3   b0 b1  | a4 a5   b2 b3

So most elements are where they should be, and the rest (a4; b0, b1) moves in one all-to-all a unit. No rank
holds more than its own part at any time, where gathering the unit would hold all of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from ...runtime.unit import Unit
from ...shared.layout import UnitLayout, chunk_rows, flat_range


@dataclass(frozen=True, slots=True)
class _Piece:
    """Elements ``[start, end)`` of the flattened parameter ``index``."""

    index: int
    start: int
    end: int


def row_range(shape: Sequence[int], world_size: int, rank: int) -> tuple[int, int]:
    """The ``[start, end)`` elements in ``rank``'s rows; a parameter without dimensions is whole on all."""
    if not shape:
        return 0, 1
    start, end = chunk_rows(shape[0], world_size, rank)
    row = math.prod(shape[1:])
    return start * row, end * row


def rows_shape(shape: Sequence[int], world_size: int, rank: int) -> tuple[int, ...]:
    """The shape of ``rank``'s rows."""
    if not shape:
        return ()
    start, end = chunk_rows(shape[0], world_size, rank)
    return (end - start, *shape[1:])


def _pieces(layout: UnitLayout, holder: int, owner: int, which: Sequence[int]) -> Iterator[_Piece]:
    """What is in the flat shard of ``holder`` and in the rows of ``owner``, in order."""
    for index in which:
        segment = layout.segments[index]
        begin = holder * layout.shard_numel - segment.full_offset
        held = flat_range(begin, layout.shard_numel, segment.numel)
        wanted = row_range(segment.shape, layout.world_size, owner)
        start, end = max(held[0], wanted[0]), min(held[1], wanted[1])
        if end > start:
            yield _Piece(index, start, end)


def _in_shard(layout: UnitLayout, shard: torch.Tensor, piece: _Piece) -> torch.Tensor:
    """Where ``piece`` is in this rank's flat shard."""
    start = layout.segments[piece.index].full_offset - layout.rank * layout.shard_numel
    return shard[start + piece.start : start + piece.end]


def _in_rows(layout: UnitLayout, rows: Mapping[int, torch.Tensor], piece: _Piece) -> torch.Tensor:
    """Where ``piece`` is in this rank's rows, by the parameters' indices."""
    first, _ = row_range(layout.segments[piece.index].shape, layout.world_size, layout.rank)
    return rows[piece.index].reshape(-1)[piece.start - first : piece.end - first]


def _exchange(
    unit: Unit, dtype: torch.dtype, sent: list[list[torch.Tensor]], received: list[list[torch.Tensor]]
) -> None:
    """Send ``sent[r]`` to each rank ``r`` and fill ``received[r]`` from it. All tensors are 1-D."""
    outgoing = [sum(piece.numel() for piece in pieces) for pieces in sent]
    incoming = [sum(piece.numel() for piece in pieces) for pieces in received]
    source = torch.empty(sum(outgoing), dtype=dtype, device=unit.device)
    flat = [piece for pieces in sent for piece in pieces]
    for target, piece in zip(source.split([piece.numel() for piece in flat]), flat, strict=True):
        target.copy_(piece)
    result = torch.empty(sum(incoming), dtype=dtype, device=unit.device)
    dist.all_to_all_single(result, source, incoming, outgoing, group=unit.groups.shard)
    places = [piece for pieces in received for piece in pieces]
    for place, value in zip(places, result.split([place.numel() for place in places]), strict=True):
        place.copy_(value)


@torch.no_grad()
def rows_of_shard(unit: Unit, shard: torch.Tensor, which: Sequence[int]) -> list[torch.Tensor]:
    """This rank's rows of the parameters ``which``, out of all ranks' flat shards. A collective.

    Args:
        shard: 1-D, ``layout.shard_numel`` elements of any dtype.
        which: indices of parameters, the same on all ranks.
    """
    layout = unit.layout
    world, rank = layout.world_size, layout.rank
    segments = [layout.segments[index] for index in which]
    rows = [shard.new_empty(rows_shape(segment.shape, world, rank)) for segment in segments]
    held = partial(_in_shard, layout, shard)
    wanted = partial(_in_rows, layout, dict(zip(which, rows, strict=True)))
    if unit.groups.shard is None:
        for piece in _pieces(layout, rank, rank, which):
            wanted(piece).copy_(held(piece))
    else:
        sent = [[held(piece) for piece in _pieces(layout, rank, other, which)] for other in range(world)]
        received = [
            [wanted(piece) for piece in _pieces(layout, other, rank, which)] for other in range(world)
        ]
        _exchange(unit, shard.dtype, sent, received)
    return rows


@torch.no_grad()
def fill_shard(unit: Unit, shard: torch.Tensor, which: Sequence[int], rows: Sequence[torch.Tensor]) -> None:
    """The inverse: write this rank's part of the parameters ``which`` into ``shard``. A collective.

    Args:
        rows: this rank's rows of each of them; a parameter without dimensions whole.
    """
    layout = unit.layout
    world, rank = layout.world_size, layout.rank
    alone = unit.groups.shard is None
    moving = [] if alone else [index for index in which if layout.segments[index].shape]
    staying = [index for index in which if index not in moving]

    owned = partial(_in_rows, layout, dict(zip(which, rows, strict=True)))
    place = partial(_in_shard, layout, shard)
    for piece in _pieces(layout, rank, rank, staying):
        place(piece).copy_(owned(piece))
    if moving:
        sent = [[owned(piece) for piece in _pieces(layout, other, rank, moving)] for other in range(world)]
        received = [
            [place(piece) for piece in _pieces(layout, rank, other, moving)] for other in range(world)
        ]
        _exchange(unit, shard.dtype, sent, received)
