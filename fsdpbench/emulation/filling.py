"""What a collective leaves in its outputs where the other ranks hold what this one holds.

Every rank is taken to have the same shards and the same gradients: gathers repeat the own part, averages
leave it, sums multiply it. Losses stay finite that way, and the writes cost the memory traffic that they cost
under NCCL.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp

Tensors = Sequence[torch.Tensor]


@torch.no_grad()
def fill_outputs(kind: str, inputs: Tensors, outputs: Tensors, rank: int, size: int, operation: Any) -> None:
    """Write what a collective of ``size`` ranks would leave on ``rank``.

    ``inputs`` and ``outputs`` are as `CollectiveCalls.run` gets them: pairs, or one tensor and a list.
    ``operation`` is the `ReduceOp`, None where there is none.
    """
    if kind == "all_gather":
        _gather(inputs, outputs, rank, size)
    elif kind == "reduce_scatter":
        for output, own in zip(outputs, _own_parts(inputs, outputs, rank, size), strict=True):
            _reduce(output, own, size, operation)
    elif kind == "all_reduce":
        for tensor in outputs:
            _reduce(tensor, tensor, size, operation)
    elif kind == "all_to_all":
        for output, source in zip(outputs, inputs, strict=True):
            if output.numel() == source.numel():
                output.copy_(source.view_as(output))
            else:
                output.zero_()


def _gather(inputs: Tensors, outputs: Tensors, rank: int, size: int) -> None:
    if len(outputs) > len(inputs):  # a list of one tensor a rank, for each input
        for index, source in enumerate(inputs):
            for output in outputs[index * size : (index + 1) * size]:
                _copy(output, source)
        return
    for output, source in zip(outputs, inputs, strict=True):
        slots, own = output.view(size, -1), source.reshape(1, -1)
        # The own shard may lie in its slot already, and a copy onto itself is refused.
        if rank:
            slots[:rank].copy_(own.expand(rank, -1))
        if rank + 1 < size:
            slots[rank + 1 :].copy_(own.expand(size - rank - 1, -1))
        if slots[rank].data_ptr() != source.data_ptr():
            slots[rank].copy_(own[0])


def _own_parts(inputs: Tensors, outputs: Tensors, rank: int, size: int) -> list[torch.Tensor]:
    if len(inputs) > len(outputs):
        return [inputs[index * size + rank] for index in range(len(outputs))]
    return [
        source if source.numel() == output.numel() else source.view(size, -1)[rank]
        for source, output in zip(inputs, outputs, strict=True)
    ]


def _reduce(output: torch.Tensor, own: torch.Tensor, size: int, operation: Any) -> None:
    if output.data_ptr() != own.data_ptr():
        _copy(output, own)
    if operation == ReduceOp.SUM:
        output.mul_(size)
    elif operation == ReduceOp.PRODUCT:
        output.pow_(size)


def _copy(output: torch.Tensor, source: torch.Tensor) -> None:
    """As much of a tensor as fits: list forms may be uneven."""
    count = min(output.numel(), source.numel())
    output.view(-1)[:count].copy_(source.reshape(-1)[:count])
