"""Input data of token models: seeded synthetic tokens, or the bytes of a text file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from workloads.base import Batch, DataError, WorkloadError

BYTE_VALUES = 256
# Keeps the random streams of neighbouring seeds and ranks apart: (0, 1) is not (1, 0).
_SEED_STRIDE = 1_000_003


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
        DataError: see `_ByteWindows`.
    """
    for name, value, least in (("batch", batch, 1), ("seq", seq, 1), ("rank", rank, 0)):
        if value < least:
            raise WorkloadError(f"{name} is {value}: it must be at least {least}")
    if data is None:
        rows = _synthetic_rows(vocab, batch, seq + 1, seed, rank)
    else:
        if world_size is None and rank > 0:
            raise WorkloadError(f"rank {rank} cannot find its share of {data}: world_size is missing")
        shares = 1 if world_size is None else world_size
        if rank >= shares:
            raise WorkloadError(f"rank is {rank}: it must be less than world_size, {shares}")
        rows = iter(_ByteWindows(data, vocab, seq + 1, shares).rows(batch, seed, rank))
    return _split(rows, torch.device(device))


def _split(rows: Iterator[Tensor], device: torch.device) -> Iterator[Batch]:
    for row in rows:
        on_device = row.to(device)
        yield on_device[:, :-1].contiguous(), on_device[:, 1:].contiguous()


def _synthetic_rows(vocab: int, batch: int, length: int, seed: int, rank: int) -> Iterator[Tensor]:
    """Uniformly drawn tokens: there is nothing to learn in them, and nothing that a kernel could exploit."""
    generator = torch.Generator().manual_seed(seed * _SEED_STRIDE + rank)
    while True:
        yield torch.randint(vocab, (batch, length), generator=generator, device="cpu")


class _ByteWindows:
    """A file cut into windows of `length` bytes (neighbours share one byte, the target of the last input).

    Raises:
        DataError: the file cannot be read, has fewer windows than there are ranks, or the vocabulary is too
            small for bytes.
    """

    def __init__(self, path: Path, vocab: int, length: int, world_size: int) -> None:
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
            reason = (
                error.strerror if isinstance(error, OSError) and error.strerror else str(error).split("\n")[0]
            )
            raise DataError(f"cannot read the data file {path}: {reason}") from error
        self._length = length
        self._count = (size - 1) // (length - 1)
        self._world_size = world_size
        if self._count < world_size:
            raise DataError(
                f"the data file {path} has {size} bytes: too few for one sequence of {length - 1} tokens "
                f"for each of {world_size} ranks; give a longer file or a smaller seq"
            )

    def rows(self, batch: int, seed: int, rank: int) -> Iterator[Tensor]:
        """Microbatches of this rank. Each epoch shuffles the windows alike on every rank and deals them out,
        so that no two ranks see the same one; the few left over sit out the epoch."""
        generator = torch.Generator().manual_seed(seed)
        dealt = self._count - self._count % self._world_size
        pending: list[Tensor] = []
        while True:
            order = torch.randperm(self._count, generator=generator, device="cpu")[:dealt]
            for index in order[rank :: self._world_size].tolist():
                start = index * (self._length - 1)
                pending.append(self._bytes[start : start + self._length])
                if len(pending) == batch:
                    yield torch.stack(pending).long()
                    pending = []
