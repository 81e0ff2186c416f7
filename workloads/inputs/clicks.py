"""Input data of recommendation models: seeded synthetic clicks, or a click log of tab-separated lines.

    label <tab> numbers <tab> ... <tab> categories <tab> ...

is the form of the Criteo logs (13 numbers, 26 categories); empty fields are 0. Numbers become sign(x) x
log(1 + |x|), categories a row by a hash of their text.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from fsdpbench.workloads.base import Batch
from fsdpbench.workloads.inputs.streaming import check_counts, draw, rank_generator, reason_of, stream
from fsdpbench.workloads.tensor_plan import DataError


def click_batches(
    *,
    numbers: int,
    features: int,
    rows: int,
    batch: int,
    seed: int,
    rank: int,
    device: torch.device | str,
    data: Path | None,
    world_size: int | None,
) -> Iterator[Batch]:
    """Endless (numbers, ids, labels): float32 of [batch, numbers], int64 of [batch, features] below `rows`,
    float32 of [batch] that are 0 or 1.

    Raises:
        WorkloadError: a number is out of range.
        DataError: see `ClickLog`.
    """
    check_counts(batch, rank)
    target = torch.device(device)
    if data is None:
        batches = _synthetic(numbers, features, rows, batch, seed, rank, target)
    else:
        log = ClickLog(data, numbers, features, rows)
        batches = stream(
            log, len(log), data, batch=batch, seed=seed, rank=rank, world_size=world_size, device=target
        )
    return (tuple(tensor.to(target) for tensor in items) for items in batches)


def _synthetic(
    numbers: int, features: int, rows: int, batch: int, seed: int, rank: int, target: torch.device
) -> Iterator[Batch]:
    generator = rank_generator(seed, rank)

    def drawn_numbers() -> Tensor:
        return torch.rand((batch, numbers), generator=generator, device="cpu")

    def drawn_ids() -> Tensor:
        return torch.randint(rows, (batch, features), generator=generator, device="cpu")

    def drawn_labels() -> Tensor:
        return torch.randint(2, (batch,), generator=generator, device="cpu").float()

    while True:
        yield (
            draw(drawn_numbers, (batch, numbers), torch.float32, target),
            draw(drawn_ids, (batch, features), torch.int64, target),
            draw(drawn_labels, (batch,), torch.float32, target),
        )


class ClickLog(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """The lines of a click log; only where they begin is kept in memory.

    Raises:
        DataError: the file cannot be read or has no lines; when a line is read, also that it is not of the
            right form.
    """

    def __init__(self, path: Path, numbers: int, features: int, rows: int) -> None:
        self._path, self._numbers, self._features, self._rows = path, numbers, features, rows
        self._starts: list[int] = []
        try:
            with path.open("rb") as log:
                position = 0
                for line in log:
                    if line.strip():
                        self._starts.append(position)
                    position += len(line)
        except OSError as error:
            raise DataError(f"cannot read the data file {path}: {reason_of(error)}") from error
        if not self._starts:
            raise DataError(f"the data file {path} has no lines")

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        with self._path.open("rb") as log:
            log.seek(self._starts[index])
            fields = log.readline().rstrip(b"\r\n").split(b"\t")
        expected = 1 + self._numbers + self._features
        if len(fields) != expected:
            raise DataError(
                f"sample {index} of {self._path} has {len(fields)} fields, the model takes {expected}: "
                f"a label, {self._numbers} numbers and {self._features} categories, separated by tabs"
            )
        try:
            label, *values = (float(field or 0) for field in fields[: 1 + self._numbers])
        except ValueError as error:
            raise DataError(f"sample {index} of {self._path}: {error}") from None
        ids = [zlib.crc32(field) % self._rows for field in fields[1 + self._numbers :]]
        squeezed = [math.copysign(math.log1p(abs(value)), value) for value in values]
        return (
            torch.tensor(squeezed, dtype=torch.float32, device="cpu"),
            torch.tensor(ids, dtype=torch.int64, device="cpu"),
            torch.tensor(label, dtype=torch.float32, device="cpu"),
        )
