"""A data set on disk, dealt out to the ranks and streamed by a `DataLoader`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from fsdpbench.workloads.tensor_plan import DataError, WorkloadError

# Keeps the random streams of neighbouring seeds and ranks apart: (0, 1) is not (1, 0).
_SEED_STRIDE = 1_000_003


def check_counts(batch: int, rank: int) -> None:
    """Raises: WorkloadError, a number is out of range."""
    for name, value, least in (("batch", batch, 1), ("rank", rank, 0)):
        if value < least:
            raise WorkloadError(f"{name} is {value}: it must be at least {least}")


def draw(
    values: Callable[[], Tensor], shape: tuple[int, ...], dtype: torch.dtype, target: torch.device
) -> Tensor:
    """`values()`, a tensor of `shape` and `dtype` on the host, for a copy to `target`.

    A simulated device keeps no values, so none are drawn for it: memory that is not written costs nothing,
    however large the batch.
    """
    return torch.empty(shape, dtype=dtype, device="cpu") if target.type == "sim" else values()


def rank_generator(seed: int, rank: int) -> torch.Generator:
    """A random stream on the CPU that no other seed and rank shares."""
    return torch.Generator().manual_seed(seed * _SEED_STRIDE + rank)


def share_count(data: Path, rank: int, world_size: int | None) -> int:
    """Among how many ranks `data` is dealt out.

    Raises:
        WorkloadError: `rank` is none of them, or their number is not known.
    """
    if world_size is None:
        if rank > 0:
            raise WorkloadError(f"rank {rank} cannot find its share of {data}: world_size is missing")
        return 1
    if rank >= world_size:
        raise WorkloadError(f"rank is {rank}: it must be less than world_size, {world_size}")
    return world_size


def reason_of(error: Exception) -> str:
    """An error's reason in one line, without the path that an OSError repeats."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).split("\n")[0]


class RankShare(Sampler[int]):
    """Endless indices of one rank. Each epoch shuffles all of them alike on every rank and deals them out,
    so that no two ranks see the same one; the few left over sit out the epoch."""

    def __init__(self, count: int, seed: int, rank: int, world_size: int) -> None:
        self._count, self._seed, self._rank, self._world_size = count, seed, rank, world_size

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._seed)
        dealt = self._count - self._count % self._world_size
        while True:
            order = torch.randperm(self._count, generator=generator, device="cpu")[:dealt]
            yield from order[self._rank :: self._world_size].tolist()


def stream(
    dataset: Dataset[Any],
    count: int,
    source: Path,
    *,
    batch: int,
    seed: int,
    rank: int,
    world_size: int | None,
    device: torch.device,
    workers: int = 0,
) -> Iterator[tuple[Tensor, ...]]:
    """Endless collated microbatches of one rank, in host memory (pinned for a CUDA device).

    Args:
        dataset: has `count` items, each a tuple of tensors.
        workers: processes that read ahead; 0 reads in this process.

    Raises:
        DataError: there are fewer items than ranks.
        WorkloadError: see `share_count`.
    """
    shares = share_count(source, rank, world_size)
    if count < shares:
        raise DataError(f"{source} has {count} samples: too few for {shares} ranks")
    loader = DataLoader(
        dataset,
        batch_size=batch,
        sampler=RankShare(count, seed, rank, shares),
        num_workers=workers,
        pin_memory=device.type == "cuda",
        # Of its own: a loader draws a seed for its workers, which must not shift the model's random stream.
        generator=torch.Generator(),
    )
    return (tuple(items) for items in loader)
