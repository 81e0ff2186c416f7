"""What every workload offers, and the errors that it raises."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


class WorkloadError(ValueError):
    """Something that the user asked of a workload cannot be had; the message says what to ask instead."""


class UnknownModelError(WorkloadError):
    """No model has this name. `nearest` holds the names that look like it."""

    def __init__(self, name: str, nearest: Sequence[str], known: Sequence[str]) -> None:
        hint = f"did you mean {' or '.join(nearest)}?" if nearest else f"known models: {', '.join(known)}"
        super().__init__(f"unknown model '{name}': {hint}")
        self.name = name
        self.nearest = tuple(nearest)


class ShapeError(WorkloadError):
    """A shape has an unknown, a missing or an impossible field."""


class DataError(WorkloadError):
    """The file given as input data cannot be used."""


@dataclass(frozen=True)
class Flops:
    """Floating point operations of one forward and backward pass of one rank's microbatch.

    `model` is what MFU counts (forward + 2 x backward, no recomputation), `hardware` what HFU counts
    (`model` + the forward passes that activation checkpointing runs again).
    """

    model: int
    hardware: int


Batch = tuple[Tensor, Tensor]


class Workload(ABC):
    """A model of one family in one shape: how to build it, feed it and count its work.

    The module that `build` returns is called as `module(inputs, targets) -> scalar loss`, or as
    `module(inputs) -> predictions`.
    """

    name: str
    family: str

    @property
    @abstractmethod
    def shape(self) -> dict[str, Any]:
        """All fields of the shape as plain values, defaults included."""

    @property
    @abstractmethod
    def parameters(self) -> int:
        """Number of parameters at `default_seq`, tied ones once; by formula, nothing is built."""

    @property
    @abstractmethod
    def default_seq(self) -> int:
        """Tokens a sample where the user names no sequence length."""

    @property
    @abstractmethod
    def block_classes(self) -> tuple[type[nn.Module], ...]:
        """The module classes that are one FSDP unit each under `wrap=block`."""

    @abstractmethod
    def build(self, activation_checkpointing: str = "none", seq: int | None = None) -> nn.Module:
        """The module, on the current default device (`with torch.device(...)`).

        Every submodule that owns parameters has a `reset_parameters()`, so a module built on `meta` can be
        materialised and initialised later. The caller seeds torch's generator.

        Raises:
            WorkloadError: `activation_checkpointing` or `seq` is not possible.
        """

    @abstractmethod
    def batches(
        self,
        batch: int,
        seq: int,
        seed: int,
        rank: int,
        device: torch.device | str,
        data: Path | None = None,
        *,
        world_size: int | None = None,
    ) -> Iterator[Batch]:
        """Endless microbatches of one rank, each on `device`; the same for the same arguments.

        Without `data` they are synthetic. With `data` each rank reads its own share of the file, which takes
        `world_size` (may be left out for rank 0 alone).

        Raises:
            DataError: the file is missing, unreadable or too small.
            WorkloadError: `batch`, `seq` or `rank` is out of range.
        """

    @abstractmethod
    def flops_per_step(self, batch: int, seq: int, activation_checkpointing: str = "none") -> Flops:
        """FLOPs of one forward and backward pass over one microbatch."""

    def samples(self, batch: int) -> int:
        """Samples in one microbatch."""
        return batch

    @abstractmethod
    def tokens(self, batch: int, seq: int) -> int | None:
        """Tokens in one microbatch; None for models that do not work on tokens."""
