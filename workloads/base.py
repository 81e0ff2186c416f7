"""What every workload offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fsdpbench.workloads.checkpointing import ActivationCheckpointing
from fsdpbench.workloads.flops import Flops, ForwardFlops
from fsdpbench.workloads.tensor_plan import WorkloadError

TRAINING_BYTES = 16
"""Bytes a parameter trained in float32 by AdamW needs: weight, gradient and two moments, four bytes each."""

Batch = tuple[Tensor, ...]
"""What one forward takes: the inputs, then the targets."""


class Workload(ABC):
    """A model of one family in one shape: how to build it, feed it and count its work.

    The module that `build` returns is called as `module(*batch) -> scalar loss`, or without the last tensor
    of the batch, the targets, as `module(*inputs) -> predictions`.

    `seq` is the number of tokens a sample. Models that do not work on sequences have none: their
    `default_seq` is None, and so is every `seq` that they take.
    """

    name: str
    family: str
    library_config: Mapping[str, Any] | None = None
    """The content of the Hugging Face file that it came from, where that was kept (`library_model.py`)."""
    is_convolutional: ClassVar[bool] = False
    """Its products are convolutions, which torch rounds to TF32 by other rules than matrix products."""

    @property
    def is_causal(self) -> bool:
        """Whether each token attends to those before it and to no other."""
        return False

    @property
    @abstractmethod
    def shape(self) -> dict[str, Any]:
        """All fields of the shape as plain values, defaults included."""

    @property
    @abstractmethod
    def parameters(self) -> int:
        """Number of parameters at `default_seq`, tied ones once; by formula, nothing is built."""

    @property
    def training_state_bytes(self) -> int:
        """Bytes of parameters, gradients and AdamW's state in float32, of all ranks together; activations
        come on top."""
        return TRAINING_BYTES * self.parameters

    @property
    @abstractmethod
    def default_seq(self) -> int | None:
        """Tokens a sample where the user names no sequence length; None for models without sequences."""

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
        seq: int | None,
        seed: int,
        rank: int,
        device: torch.device | str,
        data: Path | None = None,
        *,
        world_size: int | None = None,
    ) -> Iterator[Batch]:
        """Endless microbatches of one rank, each on `device`; the same for the same arguments.

        Without `data` they are synthetic. With `data` each rank reads its own share of it, which takes
        `world_size` (may be left out for rank 0 alone).

        Raises:
            DataError: the data is missing, unreadable or too small.
            WorkloadError: `batch`, `seq` or `rank` is out of range.
        """

    @abstractmethod
    def forward_flops(self, batch: int, seq: int | None = None) -> ForwardFlops:
        """FLOPs of one forward pass over one microbatch."""

    def flops_per_step(
        self,
        batch: int,
        seq: int | None = None,
        activation_checkpointing: str = "none",
        recomputes_in_full: bool = False,
    ) -> Flops:
        """FLOPs of one forward and backward pass over one microbatch.

        `recomputes_in_full`: checkpoints compute again also what backward does not need, as before torch 2.1.
        """
        checkpointing = ActivationCheckpointing.parse(activation_checkpointing)
        return self.forward_flops(batch, seq).training(checkpointing, recomputes_in_full)

    def samples(self, batch: int) -> int:
        """Samples in one microbatch."""
        return batch

    @abstractmethod
    def tokens(self, batch: int, seq: int | None = None) -> int | None:
        """Tokens in one microbatch; None for models that do not work on tokens."""

    @abstractmethod
    def resolve_seq(self, seq: int | None) -> int | None:
        """`seq`, or the default instead of None.

        Raises:
            WorkloadError: it is below 1, or the model has no sequences and it is given.
        """


class TokenWorkload(Workload):
    """A model that works on sequences of tokens."""

    @property
    @abstractmethod
    def default_seq(self) -> int:
        """Tokens a sample where the user names no sequence length."""

    def resolve_seq(self, seq: int | None) -> int:
        if seq is None:
            return self.default_seq
        if seq < 1:
            raise WorkloadError(f"seq is {seq}: it must be at least 1")
        return seq

    def tokens(self, batch: int, seq: int | None = None) -> int:
        return batch * self.resolve_seq(seq)


class SampleWorkload(Workload):
    """A model whose input is a sample as a whole, such as an image: it has no sequence length."""

    @property
    def default_seq(self) -> None:
        return None

    def resolve_seq(self, seq: int | None) -> None:
        if seq is not None:
            raise WorkloadError(
                f"seq is {seq}, but {self.name} does not work on sequences: leave it out (its shape, "
                f"{', '.join(self.shape)}, says how large a sample is)"
            )

    def tokens(self, batch: int, seq: int | None = None) -> None:
        self.resolve_seq(seq)
