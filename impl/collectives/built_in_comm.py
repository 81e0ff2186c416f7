"""The collectives with memory of their own that are built in, both for NCCL.

Memory of the process group makes transfers without copies; symmetric memory lets NCCL use copy engines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from . import comm
from .custom_comm import AllGather, ReduceScatter


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
        from ..shared.torch_internals import symmetric_memory as symmetric

        self._group = group
        self._symmetric: Any = symmetric
        symmetric.set_backend(backend)
        dist.barrier(group=group)  # the communicator has to exist before memory is registered with it

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        with torch.get_device_module(device).use_mem_pool(self._symmetric.get_mem_pool(device)):
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
