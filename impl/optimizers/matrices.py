"""Whole matrices from their shards, and back: a rank becomes the owner of one matrix of every `n`.

An operation on whole matrices that every rank would repeat is divided among the ranks here: of as many
matrices as there are ranks, each rank receives one whole by one all-to-all, and sends the result's rows
back by another. A rank sends and receives each element once a direction; an all-gather would bring every
matrix to every rank.

The all-to-all of the next batch runs while this one is worked on:

    stream of the group   in 0   in 1  out 0   in 2  out 1        out 2
    computation                 work 0       work 1        work 2

The sizes may differ: matrices are taken in order of size, so that those of a batch cost about the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

Work = Callable[[Tensor], Tensor]
"""From a whole matrix [rows, columns] to one of the same shape and dtype."""


def is_sharded(tensor: Tensor) -> bool:
    """Whether ranks hold different parts of `tensor`."""
    return isinstance(tensor, DTensor) and any(
        not placement.is_replicate() and size > 1
        for placement, size in zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    )


def row_group(tensor: DTensor) -> dist.ProcessGroup | None:
    """The ranks among which the rows are divided; None unless that is the only division, by whole chunks."""
    divided = [
        (dimension, placement)
        for dimension, placement in enumerate(tensor.placements)
        if not placement.is_replicate() and tensor.device_mesh.size(dimension) > 1
    ]
    if len(divided) != 1 or type(divided[0][1]) is not Shard or divided[0][1].dim != 0:
        return None
    return tensor.device_mesh.get_group(divided[0][0])


def worked_on_whole(shards: Sequence[Tensor], like: Sequence[DTensor], work: Work) -> list[Tensor]:
    """`work` of each matrix, as the shards of its results.

    `shards`: this rank's parts [local rows, columns], contiguous; `like`: the parameters that say how they
    are divided. Collective over the ranks of each parameter's mesh: all ranks pass the same matrices in the
    same order. Results have the shards' shapes and dtypes.
    """
    results: list[Tensor | None] = [None] * len(shards)
    by_group: dict[dist.ProcessGroup | None, list[int]] = {}
    for index, parameter in enumerate(like):
        by_group.setdefault(row_group(parameter), []).append(index)
    for index in by_group.pop(None, []):
        results[index] = _gathered(shards[index], like[index], work)
    for group, indices in by_group.items():
        assert group is not None
        indices.sort(key=lambda index: (-like[index].numel(), index))
        for index, result in _divided(shards, like, indices, group, work):
            results[index] = result
    return [result for result in results if result is not None]


def _gathered(shard: Tensor, like: DTensor, work: Work) -> Tensor:
    """One matrix, gathered and worked on by every rank: divisions that the all-to-all does not know."""
    mesh = like.device_mesh
    sharded = DTensor.from_local(
        shard, mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    whole = DTensor.from_local(work(sharded.full_tensor()), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(placements=like.placements).to_local()


@dataclass
class _Batch:
    """At most as many matrices as ranks; rank `i` owns the `i`-th."""

    indices: list[int]
    received: Tensor
    pending: dist.Work | None
    sent: list[int] = field(default_factory=list)
    """Elements of this rank's shard of each matrix, 0 for ranks that own none."""
    taken: list[int] = field(default_factory=list)
    """Elements that each rank has of the matrix that this one owns."""


def _divided(
    shards: Sequence[Tensor],
    like: Sequence[DTensor],
    indices: Sequence[int],
    group: dist.ProcessGroup,
    work: Work,
) -> Iterator[tuple[int, Tensor]]:
    size = dist.get_world_size(group)
    batches = [list(indices[start : start + size]) for start in range(0, len(indices), size)]
    arriving = _start(shards, like, batches[0], group)
    leaving: _Batch | None = None
    for following in [*batches[1:], None]:
        current = arriving
        if following is not None:
            arriving = _start(shards, like, following, group)
        back = _work_on(current, like, group, work)
        if leaving is not None:
            yield from _results(leaving, shards)
        leaving = back
    if leaving is not None:
        yield from _results(leaving, shards)


def _start(
    shards: Sequence[Tensor], like: Sequence[DTensor], indices: list[int], group: dist.ProcessGroup
) -> _Batch:
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    sent = [shards[index].numel() for index in indices] + [0] * (size - len(indices))
    taken = _rows(like[indices[rank]], size) if rank < len(indices) else [0] * size
    packed = torch.cat([shards[index].reshape(-1) for index in indices])
    received = packed.new_empty(sum(taken))
    pending = dist.all_to_all_single(received, packed, taken, sent, group=group, async_op=True)
    return _Batch(indices, received, pending, sent, taken)


def _rows(matrix: DTensor, size: int) -> list[int]:
    """Elements of each rank's chunk of rows, as `torch.chunk` divides them."""
    rows, columns = matrix.shape
    chunk = -(-rows // size)
    return [max(0, min(chunk, rows - rank * chunk)) * columns for rank in range(size)]


def _work_on(batch: _Batch, like: Sequence[DTensor], group: dist.ProcessGroup, work: Work) -> _Batch:
    """The owner's part, and the way back."""
    if batch.pending is not None:
        batch.pending.wait()
    rank, whole = dist.get_rank(group), batch.received
    if rank < len(batch.indices):
        whole = work(whole.view(like[batch.indices[rank]].shape)).reshape(-1)
    back = whole.new_empty(sum(batch.sent))
    pending = dist.all_to_all_single(back, whole, batch.sent, batch.taken, group=group, async_op=True)
    return _Batch(batch.indices, back, pending, batch.sent)


def _results(batch: _Batch, shards: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
    if batch.pending is not None:
        batch.pending.wait()
    parts = batch.received.split(batch.sent[: len(batch.indices)])
    for index, part in zip(batch.indices, parts, strict=True):
        yield index, part.view(shards[index].shape)
