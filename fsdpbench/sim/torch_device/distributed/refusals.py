"""NCCL's refusals, with its texts and exception types.

`torch.distributed` itself checks dtypes of lists and members of groups.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from fsdpbench.sim.torch_device.strict.words import error_text

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def refuse_strided(tensors: Iterable[torch.Tensor]) -> None:
    """Raise unless tensors are dense and contiguous, or channels-last."""
    for tensor in tensors:
        if tensor.is_sparse:
            raise ValueError("Tensors must be CUDA and dense")
        if tensor.is_contiguous():
            continue
        order = _CHANNELS_LAST.get(tensor.dim())
        if order is None or not tensor.is_contiguous(memory_format=order):
            raise ValueError("Tensors must be contiguous")


def refuse_gather(output: torch.Tensor, input: torch.Tensor, ranks: int) -> None:
    """Raise unless an all-gather's output fits its input."""
    if output.dtype is not input.dtype:
        raise TypeError("output tensor must have the same type as input tensor")
    if output.numel() != input.numel() * ranks:
        raise ValueError("output tensor size must be equal to world_size times input tensor size")


def refuse_reduce_scatter(output: torch.Tensor, input: torch.Tensor, ranks: int) -> None:
    """Raise unless a reduce-scatter's input fits its output."""
    if output.dtype is not input.dtype:
        raise TypeError("input tensor must be the same type as the output tensor.")
    if input.numel() != output.numel() * ranks:
        raise ValueError("input tensor must be the same size as output size times world size")


def refuse_splits(sizes: Sequence[int] | None, tensor: torch.Tensor, ranks: int) -> None:
    """Raise unless an all-to-all has a part for each rank and these are the tensor; NCCL takes no sizes."""
    if not sizes:
        return
    if len(sizes) != ranks:
        raise RuntimeError("Number of tensor splits not equal to group size")
    if sum(sizes) != tensor.shape[0]:
        raise RuntimeError("Split sizes doesn't match total dim 0 size")


def refuse_list(tensors: Sequence[torch.Tensor], ranks: int) -> None:
    """Raise unless there is one tensor a rank."""
    if len(tensors) != ranks:
        raise ValueError(error_text("scatter.ranks", len(tensors), ranks))


def refuse_sizes(tensors: Sequence[torch.Tensor], own: torch.Tensor, name: str) -> None:
    """Raise unless each tensor of `gather`'s or `scatter`'s list has the size of the own one."""
    for index, tensor in enumerate(tensors):
        if tensor.shape != own.shape:
            raise ValueError(error_text("nccl.size", name, index, tuple(own.shape), tuple(tensor.shape)))


def refuse_count(tensors: Sequence[torch.Tensor], ranks: int, name: str, side: str) -> None:
    """Raise unless `gather`'s or `scatter`'s root has as many `tensors` as `ranks`."""
    if len(tensors) != ranks:
        raise ValueError(error_text("nccl.list", name, side, len(tensors), side.capitalize(), ranks))


def refuse_point_to_point() -> NoReturn:
    """Raise: the other rank is not there."""
    raise NotImplementedError(error_text("refusals.send"))


def are_like_neighbours(
    sent: Sequence[tuple[int, int]], received: Sequence[tuple[int, int]], rank: int, ranks: int
) -> bool:
    """Return whether all ranks can call as this one: the rank k behind sends it what it sends to the one k
    ahead, or those that it sends to send as much back. Of each message: the other rank, bytes."""
    ahead = sorted(((other - rank) % ranks, nbytes) for other, nbytes in sent)
    behind = sorted(((rank - other) % ranks, nbytes) for other, nbytes in received)
    return ahead == behind or sorted(sent) == sorted(received)


def refuse_root(opts: Any, ranks: int, name: str) -> None:
    """Raise unless the root is a member of the group."""
    root = getattr(opts, "rootRank", 0)
    if not 0 <= root < ranks:
        raise dist.DistBackendError(
            f"NCCL error in {name}: invalid argument (root {root} of a group of {ranks} ranks)"
        )
