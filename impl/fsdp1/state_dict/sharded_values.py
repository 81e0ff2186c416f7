"""The values of a sharded state dict: ``ShardedTensor`` or ``DTensor`` around this rank's rows.

As in torch, values are ``DTensor`` if the unit was wrapped with a ``device_mesh``. Making them needs no
communication, because every rank can compute the rows of all ranks.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as ShardPlacement

from ...collectives.agreement import some
from ...runtime.unit import Unit
from ...shared import error_text
from ...shared.layout import UnitLayout, chunk_rows
from ...shared.torch_internals import (
    ShardedTensor,
    ShardedTensorMetadata,
    ShardedTensorShard,
    ShardMetadata,
    TensorProperties,
    sharded_tensor_from_shards,
)
from ..flat_param import flat_range

# From a unit's flat shards to rows of its parameters and back, without gathering the unit.
#
# A flat shard may end inside a row. A sharded state dict needs rows as chunked by ``torch.chunk``. Example
# with two parameters a (3 x 2) and b (4) on two ranks::
#
#     flat shards    a0 a1 a2 a3 a4       | a5 b0 b1 b2 b3
#     rows           a0 a1 a2 a3   b0 b1  | a4 a5   b2 b3
#
# Most elements are already on the right rank; the rest (a4; b0, b1) moves in one all-to-all for each unit. No
# rank ever holds more than its own part, whereas gathering would need memory for the whole unit.


@dataclass(frozen=True, slots=True)
class _Piece:
    """Elements ``[start, end)`` of the flattened parameter ``index``."""

    index: int
    start: int
    end: int


def row_range(shape: Sequence[int], world_size: int, rank: int) -> tuple[int, int]:
    """Return the elements ``[start, end)`` in the rows of ``rank``; every rank has all of a scalar."""
    if not shape:
        return 0, 1
    start, end = chunk_rows(shape[0], world_size, rank)
    row = math.prod(shape[1:])
    return start * row, end * row


def rows_shape(shape: Sequence[int], world_size: int, rank: int) -> tuple[int, ...]:
    """Return the shape of the rows of ``rank``."""
    if not shape:
        return ()
    start, end = chunk_rows(shape[0], world_size, rank)
    return (end - start, *shape[1:])


def _pieces(layout: UnitLayout, holder: int, owner: int, which: Sequence[int]) -> Iterator[_Piece]:
    """Yield the pieces that are in the flat shard of ``holder`` and in the rows of ``owner``, in order."""
    for index in which:
        segment = layout.segments[index]
        begin = holder * layout.shard_numel - segment.full_offset
        held = flat_range(begin, layout.shard_numel, segment.numel)
        wanted = row_range(segment.shape, layout.world_size, owner)
        start, end = max(held[0], wanted[0]), min(held[1], wanted[1])
        if end > start:
            yield _Piece(index, start, end)


def _in_shard(layout: UnitLayout, shard: torch.Tensor, piece: _Piece) -> torch.Tensor:
    """Return ``piece`` as a view of this rank's flat shard."""
    start = layout.segments[piece.index].full_offset - layout.rank * layout.shard_numel
    return shard[start + piece.start : start + piece.end]


def _in_rows(layout: UnitLayout, rows: Mapping[int, torch.Tensor], piece: _Piece) -> torch.Tensor:
    """Return ``piece`` as a view of this rank's ``rows`` (by parameter index)."""
    first, _ = row_range(layout.segments[piece.index].shape, layout.world_size, layout.rank)
    return rows[piece.index].reshape(-1)[piece.start - first : piece.end - first]


def _move(
    unit: Unit,
    dtype: torch.dtype,
    which: Sequence[int],
    source: Callable[[_Piece], torch.Tensor],
    target: Callable[[_Piece], torch.Tensor],
    *,
    to_rows: bool,
) -> None:
    """Copy all pieces of the parameters ``which`` from shards to rows, or back. Collective.

    Args:
        source, target: return the 1-D view of a piece that this rank sends or receives.
    """
    layout = unit.layout
    world, rank = layout.world_size, layout.rank

    def pieces(giver: int, getter: int) -> Iterator[_Piece]:
        return _pieces(layout, giver, getter, which) if to_rows else _pieces(layout, getter, giver, which)

    if unit.groups.shard is None:
        for piece in pieces(rank, rank):
            target(piece).copy_(source(piece))
        return
    sent = [list(map(source, pieces(rank, other))) for other in range(world)]
    received = [list(map(target, pieces(other, rank))) for other in range(world)]
    _exchange(unit, dtype, sent, received)


def _exchange(
    unit: Unit, dtype: torch.dtype, sent: list[list[torch.Tensor]], received: list[list[torch.Tensor]]
) -> None:
    """Send ``sent[r]`` to each rank ``r`` and fill ``received[r]`` from it. All tensors are 1-D."""
    # Each rank computes both sizes from the layout, so no sizes are sent.
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
    """Return this rank's rows of the parameters ``which`` from the flat shards of all ranks. Collective.

    Args:
        shard: 1-D, ``layout.shard_numel`` elements of any dtype.
        which: indices of parameters, the same on all ranks.
    """
    layout = unit.layout
    shapes = [layout.segments[index].shape for index in which]
    rows = [shard.new_empty(rows_shape(shape, layout.world_size, layout.rank)) for shape in shapes]
    place = partial(_in_rows, layout, dict(zip(which, rows, strict=True)))
    _move(unit, shard.dtype, which, partial(_in_shard, layout, shard), place, to_rows=True)
    return rows


@torch.no_grad()
def fill_shard(unit: Unit, shard: torch.Tensor, which: Sequence[int], rows: Sequence[torch.Tensor]) -> None:
    """Write this rank's part of the parameters ``which`` into ``shard``. Collective.

    Args:
        rows: this rank's rows of each parameter; all of a scalar.
    """
    layout = unit.layout
    owned = partial(_in_rows, layout, dict(zip(which, rows, strict=True)))
    place = partial(_in_shard, layout, shard)
    # Every rank has all of a scalar parameter.
    whole = [index for index in which if not layout.segments[index].shape]
    for piece in _pieces(layout, layout.rank, layout.rank, whole):
        place(piece).copy_(owned(piece))
    moving = [index for index in which if index not in whole]
    if moving:
        _move(unit, shard.dtype, moving, owned, place, to_rows=False)


def is_sharded(value: object) -> bool:
    """Return whether ``value`` is a ``ShardedTensor`` or ``DTensor``."""
    return isinstance(value, (ShardedTensor, DTensor))


def sharded_value(
    unit: Unit, rows: torch.Tensor, shape: Sequence[int], mesh: DeviceMesh | None
) -> torch.Tensor | ShardedTensor:
    """Wrap this rank's ``rows`` of a tensor of ``shape``; return ``rows`` if it is not sharded."""
    if unit.groups.shard is None or not shape:
        return rows
    if mesh is None:
        world = unit.layout.world_size
        spans = [chunk_rows(shape[0], world, rank) for rank in range(world)]
        return sharded_tensor(unit, rows, shape, [(first, end) for first, end in spans if end > first])
    placements = [*([Replicate()] * (mesh.ndim - 1)), ShardPlacement(0)]
    stride = torch.empty(tuple(shape), device="meta").stride()
    return DTensor.from_local(rows, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def sharded_tensor(
    unit: Unit, local: torch.Tensor, shape: Sequence[int], spans: Sequence[tuple[int, int]]
) -> ShardedTensor:
    """Return a ``ShardedTensor`` over the unit's shard group in which rank ``r`` has the rows ``spans[r]``.

    Args:
        local: this rank's rows; ignored if this rank is not among the first ``len(spans)`` ranks.
        spans: rows ``[start, end)`` of the first ranks; later ranks have none.
    """
    group: Any = unit.groups.shard
    rest = [0] * (len(shape) - 1)
    shards = [
        ShardMetadata([start, *rest], [end - start, *shape[1:]], _where(group, rank, local.device))
        for rank, (start, end) in enumerate(spans)
    ]
    rank = unit.groups.shard_rank
    metadata = ShardedTensorMetadata(
        shards_metadata=shards,
        size=torch.Size(shape),
        tensor_properties=TensorProperties(dtype=local.dtype, pin_memory=local.is_pinned()),
    )
    return sharded_tensor_from_shards(
        [ShardedTensorShard(local, shards[rank])] if rank < len(shards) else [], metadata, process_group=group
    )


def _where(group: Any, rank: int, device: torch.device) -> str:
    """Return the placement string of a shard, with the global rank."""
    everywhere = dist.get_global_rank(group, rank)
    if device.type == "cpu":
        return f"rank:{everywhere}/cpu"
    count = torch.get_device_module(device).device_count()
    return f"rank:{everywhere}/{device.type}:{everywhere % count}"


def rows_of_value(unit: Unit, value: Any, name: str) -> torch.Tensor:
    """Return this rank's rows of a ``ShardedTensor`` or ``DTensor``.

    A ``DTensor`` with another layout is gathered over its own mesh and then sliced.

    Raises:
        ValueError: a ``ShardedTensor`` does not have the rows of this unit's ranks as its shards.
    """
    world, rank = unit.layout.world_size, unit.layout.rank
    shape = tuple(value.size())
    first, end = chunk_rows(shape[0], world, rank) if shape else (0, 1)
    if isinstance(value, DTensor):
        mesh = value.device_mesh
        *outer, last = value.placements
        fits = mesh.size(mesh.ndim - 1) == world and mesh.get_local_rank(mesh.ndim - 1) == rank
        if fits and last == ShardPlacement(0) and all(place.is_replicate() for place in outer):
            return value.to_local()
        return value.full_tensor()[first:end] if shape else value.full_tensor()
    shards = value.local_shards()
    if not shards and end == first:
        return torch.empty(rows_shape(shape, world, rank), dtype=value.dtype)
    found = [(tuple(each.tensor.shape), list(each.metadata.shard_offsets)) for each in shards]
    if found != [(rows_shape(shape, world, rank), [first, *[0] * (len(shape) - 1)])]:
        parts = " and ".join(f"{shape} at {offsets}" for shape, offsets in found) or "nothing"
        raise ValueError(error_text("sharded_values.rows_of_value", name, parts, world, first, end, shape))
    return shards[0].tensor


# -- check that all ranks agree, before values are moved -----------------------------------------------------


def check_agreement(
    group: ProcessGroup | None, device: torch.device, items: Sequence[str], what: str
) -> None:
    """Compare the set of ``items`` over the ranks of ``group``: a small all-reduce, a gather on mismatch.

    Raises:
        RuntimeError: on all ranks if the items differ; the message lists the items that some ranks lack.
    """
    if group is None:
        return
    ordered = sorted(items)
    digest = hashlib.blake2b("\0".join(ordered).encode(), digest_size=7).digest()
    number = int.from_bytes(digest, "little")
    extremes = torch.tensor([number, -number], dtype=torch.int64, device=device)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    highest, lowest = extremes.tolist()
    if highest == -lowest:
        return
    gathered: list[list[str]] = [[] for _ in range(group.size())]
    dist.all_gather_object(gathered, ordered, group=group)
    everywhere = set.intersection(*map(set, gathered))
    lines = [f"ranks do not agree on {what}:"]
    for rank, theirs in enumerate(gathered):
        own = [item for item in theirs if item not in everywhere]
        if own:
            lines.append(f"  not on all ranks, but on rank {rank} of the group: {some(own)}")
    raise RuntimeError("\n".join(lines))
