"""Collectives of the user's own, and memory for collectives from elsewhere than the caching allocator.

The protocol is torch's: an object with ``allocate``, for every buffer that it communicates from or into, and
``__call__``. A unit that has one takes the buffer of each gather from it and drops it after the copy out.
This rank's part is written into that buffer first, so that the gather is in place. Two kinds are built in,
both for NCCL: memory of the process group (zero-copy transfers), and symmetric memory (copy engines).

Anything with the right methods will do; the classes here say what they are.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ..runtime.buffer import FlatBuffer
from ..runtime.streams import Lane
from . import comm


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


class CommBuffer(FlatBuffer):
    """A buffer whose memory is ``source.allocate``'s, another one each time it is taken."""

    __slots__ = ("_request", "_source")

    def __init__(
        self, source: Comm, numel: int, dtype: torch.dtype, device: torch.device, owner: Lane
    ) -> None:
        self.owner = owner
        self.nbytes = numel * dtype.itemsize
        self._source = source
        self._request = (numel, dtype, device)
        with owner:
            self.tensor = self._allocate()

    def _allocate(self) -> torch.Tensor:
        numel, dtype, device = self._request
        return self._source.allocate((numel,), dtype=dtype, device=device)

    @property
    def taken(self) -> bool:
        """Whether there is memory behind the buffer now."""
        return self.tensor.numel() == self._request[0]

    def take(self) -> None:
        """Allocate; the caller must be on the owner's lane."""
        if not self.taken:
            self.tensor = self._allocate()

    def free(self) -> None:
        """Drop the memory."""
        self.tensor = self.tensor.new_empty(0)


def make_buffer(
    numel: int, dtype: torch.dtype, device: torch.device, owner: Lane, custom: Comm | None
) -> FlatBuffer:
    """A buffer to communicate from or into, taken."""
    if custom is None:
        return FlatBuffer(numel, dtype, device, owner)
    return CommBuffer(custom, numel, dtype, device, owner)


class _FromGroup:
    """Memory of the group's own allocator, where its backend has one."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        backend: Any = self._group._get_backend(device)
        if not backend.supports_tensor_alloc(device):
            return torch.empty(*size, dtype=dtype, device=device)
        return backend.allocate_tensor(math.prod(size), dtype=dtype, device=device)


class _Symmetric:
    """Symmetric memory: the same on all ranks of the group, who meet once to make it."""

    def __init__(self, group: ProcessGroup, backend: str) -> None:
        import torch.distributed._symmetric_memory as symmetric

        self._group = group
        self._symmetric: Any = symmetric
        symmetric.set_backend(backend)  # type: ignore[arg-type]
        dist.barrier(group=group)  # the communicator has to exist before memory is registered with it

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        with torch.cuda.use_mem_pool(self._symmetric.get_mem_pool(device)):
            return torch.empty(*size, dtype=dtype, device=device)

    def register(self, *tensors: torch.Tensor) -> None:
        """Make the memory of ``tensors`` known to all ranks."""
        for tensor in tensors:
            self._symmetric.rendezvous(tensor, group=self._group.group_name)


class GroupAllGather(_FromGroup, AllGather):
    """The ordinary all-gather, in memory of the process group."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        return comm.all_gather(output_tensor, input_tensor, group, async_op)


class GroupReduceScatter(_FromGroup, ReduceScatter):
    """The ordinary reduce-scatter, in memory of the process group."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        return comm.reduce_scatter(output_tensor, input_tensor, group, op, async_op)


class SymmetricAllGather(_Symmetric, AllGather):
    """The ordinary all-gather, in symmetric memory, by which NCCL chooses its faster ways."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.register(output_tensor)  # the input is a part of it
        return comm.all_gather(output_tensor, input_tensor, group, async_op)


class SymmetricReduceScatter(_Symmetric, ReduceScatter):
    """The ordinary reduce-scatter, in symmetric memory. NCCL has it for sums alone."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.register(input_tensor, output_tensor)
        return comm.reduce_scatter(output_tensor, input_tensor, group, op, async_op)


BUILT_IN = (GroupAllGather, GroupReduceScatter, SymmetricAllGather, SymmetricReduceScatter)
"""Those that one of the settings chooses, and another may replace."""
