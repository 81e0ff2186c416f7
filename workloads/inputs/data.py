"""Input data of token models: seeded synthetic tokens, or the bytes of a text file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from fsdpbench.workloads.base import Batch
from fsdpbench.workloads.inputs.streaming import (
    check_counts,
    draw,
    rank_generator,
    reason_of,
    share_count,
    stream,
)
from fsdpbench.workloads.tensor_plan import DataError

BYTE_VALUES = 256


def token_batches(
    *,
    vocab: int,
    batch: int,
    seq: int,
    seed: int,
    rank: int,
    device: torch.device | str,
    data: Path | None,
    world_size: int | None,
) -> Iterator[Batch]:
    """Endless (inputs, targets), int64 of shape [batch, seq]; targets are the inputs one token later.

    Arguments are checked at the call, not at the first batch.

    Raises:
        WorkloadError: a number is out of range.
        DataError: see `ByteWindows`.
    """
    rows = token_rows(
        vocab=vocab,
        batch=batch,
        length=seq + 1,
        # Neighbours share one byte, the target of the last input.
        overlap=1,
        seed=seed,
        rank=rank,
        device=device,
        data=data,
        world_size=world_size,
    )
    return ((row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in rows)


def token_rows(
    *,
    vocab: int,
    batch: int,
    length: int,
    overlap: int,
    seed: int,
    rank: int,
    device: torch.device | str,
    data: Path | None,
    world_size: int | None,
) -> Iterator[Tensor]:
    """Endless int64 tensors of shape [batch, length] on `device`: tokens in a row.

    Synthetic ones are drawn uniformly; of a file, they are windows of `length` bytes of which neighbours
    share `overlap`.

    Raises:
        WorkloadError: a number is out of range.
        DataError: see `ByteWindows`.
    """
    check_counts(batch, rank)
    target = torch.device(device)
    if data is None:
        rows = _synthetic_rows(vocab, batch, length, seed, rank, target)
    else:
        shares = share_count(data, rank, world_size)
        windows = ByteWindows(data, vocab, length, overlap, shares)
        loaded = stream(
            windows,
            len(windows),
            data,
            batch=batch,
            seed=seed,
            rank=rank,
            world_size=shares,
            device=target,
        )
        rows = (row.long() for (row,) in loaded)
    return (row.to(target) for row in rows)


def _synthetic_rows(
    vocab: int, batch: int, length: int, seed: int, rank: int, target: torch.device
) -> Iterator[Tensor]:
    """Uniformly drawn tokens: there is nothing to learn in them, and nothing that a kernel could exploit."""
    generator = rank_generator(seed, rank)
    shape = (batch, length)

    def values() -> Tensor:
        return torch.randint(vocab, shape, generator=generator, device="cpu")

    while True:
        yield draw(values, shape, torch.int64, target)


class ByteWindows(Dataset[tuple[Tensor]]):
    """A file cut into windows of `length` bytes, each one sample: a uint8 tensor.

    Raises:
        DataError: the file cannot be read, has fewer windows than there are ranks, or the vocabulary is too
            small for bytes.
    """

    def __init__(self, path: Path, vocab: int, length: int, overlap: int, world_size: int) -> None:
        if vocab < BYTE_VALUES:
            raise DataError(
                f"cannot feed {path} to a model with vocab {vocab}: "
                f"bytes take a vocab of at least {BYTE_VALUES}"
            )
        try:
            size = path.stat().st_size
            # A private mapping: nothing is read before it is used, and ranks share the page cache.
            self._bytes = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
        except (OSError, RuntimeError) as error:
            raise DataError(f"cannot read the data file {path}: {reason_of(error)}") from error
        self._length = length
        self._stride = length - overlap
        self._count = max(0, size - overlap) // self._stride
        if self._count < world_size:
            raise DataError(
                f"the data file {path} has {size} bytes: too few for one sequence of {self._stride} tokens "
                f"for each of {world_size} ranks; give a longer file or a smaller seq"
            )

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor]:
        start = index * self._stride
        return (self._bytes[start : start + self._length],)
