"""Collectives of the user's own, and memory for collectives from elsewhere than the caching allocator.

The protocol is torch's: an object with ``allocate``, for every buffer that it communicates from or into, and
``__call__``. A unit that has one takes the buffer of each gather from it and drops it after the copy out.
This rank's part is written into that buffer first, so that the gather is in place. Two kinds are built in
(``built_in_comm.py``).

Anything with the right methods will do; the classes here say what they are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup


class Comm(ABC):
    """A collective with memory of its own."""

    @abstractmethod
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory to communicate from or into; called once a buffer and use, on the stream that owns it."""


class AllGather(Comm):
    """Gathers equal 1-D shards."""

    @abstractmethod
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill ``output_tensor``, of which ``input_tensor`` is this rank's part, on the current stream."""


class ReduceScatter(Comm):
    """Reduces a 1-D tensor and leaves each rank its part."""

    @abstractmethod
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce ``input_tensor`` by ``op`` into ``output_tensor``, on the current stream."""
