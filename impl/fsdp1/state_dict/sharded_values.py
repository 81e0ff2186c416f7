"""The values of a sharded state dict: ``ShardedTensor`` or ``DTensor`` around this rank's rows.

Which of them follows torch: a ``DTensor`` if the unit was wrapped with a ``device_mesh``. Making one needs no
communication, since every rank knows what the others have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as ShardPlacement

from ...runtime.unit import Unit
from ...shared.layout import chunk_rows
from ...shared.torch_internals import (
    ShardedTensor,
    ShardedTensorMetadata,
    ShardedTensorShard,
    ShardMetadata,
    TensorProperties,
    sharded_tensor_from_shards,
)
from .row_chunks import rows_shape


def is_sharded(value: object) -> bool:
    """Whether ``value`` is one of the two."""
    return isinstance(value, (ShardedTensor, DTensor))


def sharded_value(
    unit: Unit, rows: torch.Tensor, shape: Sequence[int], mesh: DeviceMesh | None
) -> torch.Tensor | ShardedTensor:
    """Wrap this rank's ``rows`` of a tensor of ``shape``; what is not sharded is returned as it is."""
    if unit.groups.shard is None or not shape:
        return rows
    if mesh is None:
        spans = [(first, end) for first, end in _all_rows(unit, shape[0]) if end > first]
        return sharded_tensor(unit, rows, shape, spans)
    placements = [*([Replicate()] * (mesh.ndim - 1)), ShardPlacement(0)]
    stride = torch.empty(tuple(shape), device="meta").stride()
    return DTensor.from_local(rows, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def sharded_tensor(
    unit: Unit, local: torch.Tensor, shape: Sequence[int], spans: Sequence[tuple[int, int]]
) -> ShardedTensor:
    """A ``ShardedTensor`` over the unit's shard group, of which rank ``r`` has the rows ``spans[r]``.

    Args:
        local: this rank's rows; ignored if it is not among the first ``len(spans)`` ranks.
        spans: ``[start, end)`` rows of the first ranks; those after them have none.
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
    """The name of a shard's place; ranks in it are global ones."""
    everywhere = dist.get_global_rank(group, rank)
    if device.type == "cpu":
        return f"rank:{everywhere}/cpu"
    count = torch.get_device_module(device).device_count()
    return f"rank:{everywhere}/{device.type}:{everywhere % count}"


def _all_rows(unit: Unit, rows: int) -> list[tuple[int, int]]:
    world = unit.layout.world_size
    return [chunk_rows(rows, world, rank) for rank in range(world)]


def rows_of_value(unit: Unit, value: Any, name: str) -> torch.Tensor:
    """This rank's rows out of a ``ShardedTensor`` or ``DTensor``.

    A ``DTensor`` that is laid out in any other way than ours is gathered on its own mesh, and cut.

    Raises:
        ValueError: a ``ShardedTensor`` that is not cut into the rows of this unit's ranks.
    """
    world, rank = unit.layout.world_size, unit.layout.rank
    shape = tuple(value.size())
    if isinstance(value, DTensor):
        mesh = value.device_mesh
        *outer, last = value.placements
        fits = mesh.size(mesh.ndim - 1) == world and mesh.get_local_rank(mesh.ndim - 1) == rank
        if fits and last == ShardPlacement(0) and all(place.is_replicate() for place in outer):
            return value.to_local()
        first, end = chunk_rows(shape[0], world, rank) if shape else (0, 1)
        return value.full_tensor()[first:end] if shape else value.full_tensor()
    shards = value.local_shards()
    first, end = chunk_rows(shape[0], world, rank)
    if len(shards) > 1 or (not shards and end > first):
        raise ValueError(
            f"'{name}': this rank's part of the ShardedTensor has {len(shards)} shards where it should have "
            f"one with the rows {first} to {end} of {shape}; load it with torch.distributed.checkpoint "
            f"for {world} ranks"
        )
    if not shards:
        return torch.empty(rows_shape(shape, world, rank), dtype=value.dtype)
    local = shards[0].tensor
    offsets = list(shards[0].metadata.shard_offsets)
    if tuple(local.shape) != rows_shape(shape, world, rank) or offsets != [first] + [0] * (len(shape) - 1):
        raise ValueError(
            f"'{name}': this rank's part of the ShardedTensor is {tuple(local.shape)} at {offsets}, but for "
            f"{world} ranks it should be the rows {first} to {end} of {shape}; load it with "
            "torch.distributed.checkpoint for this number of ranks"
        )
    return local
