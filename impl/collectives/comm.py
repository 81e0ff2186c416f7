"""Collectives: process groups, the calls for each backend, and the averaging of gradients.

Asynchronous work differs by device. With streams, a collective is queued on the current stream and the caller
records an event. On the CPU, it runs on the backend's threads and the caller waits on its ``Work``.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property, lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.distributed_c10d import AllgatherOptions, ReduceScatterOptions

# torch 2.13 renamed these two and warns about the old names; 2.11 and 2.12 have only the old ones.
_all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter_single: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)

# Whether the methods of a group are public (torch 2.13). Calling them avoids the host overhead of ``dist``.
_CALLS_GROUPS = hasattr(ProcessGroup, "all_gather_single")

# Dtypes in which a sum of gradients cannot overflow.
_WIDE = (torch.float32, torch.float64, torch.bfloat16)

# A gloo group with at most this many ranks gathers by broadcasts.
_FEW_RANKS = 4

# Groups used only for reduce-scatters, one for each shard group, with its lifetime.
_reduce_groups: MutableMapping[ProcessGroup, ProcessGroup] = WeakKeyDictionary()


@dataclass(frozen=True)
class UnitGroups:
    """The process groups of a unit. ``shard`` holds one copy of it; ranks of ``replicate`` hold equal shards.

    A group of one rank is ``None``, because it needs no communication. Reduce-scatters use ``reduce``, which
    has the ranks of ``shard``. It is usually the same group, and so the same communicator.
    """

    shard: ProcessGroup | None
    shard_size: int
    shard_rank: int
    replicate: ProcessGroup | None = None
    replicate_size: int = 1
    reduce: ProcessGroup | None = None
    # Whether both groups were given, even if they have one rank.
    hybrid: bool = False

    @classmethod
    def of(cls, shard: ProcessGroup | None, replicate: ProcessGroup | None = None) -> "UnitGroups":
        """Return the ``UnitGroups`` of two process groups; ``None`` means a group of only this rank."""
        shard_size = shard.size() if shard is not None else 1
        replicate_size = replicate.size() if replicate is not None else 1
        return cls(
            shard=shard if shard_size > 1 else None,
            shard_size=shard_size,
            shard_rank=shard.rank() if shard is not None else 0,
            replicate=replicate if replicate_size > 1 else None,
            replicate_size=replicate_size,
            reduce=shard if shard_size > 1 else None,
            hybrid=shard is not None and replicate is not None,
        )

    def with_reduce_group(self, separate: bool) -> "UnitGroups":
        """Return these groups with or without a ``separate`` reduce group. The first call is collective."""
        if self.shard is None or not separate:
            return replace(self, reduce=self.shard)
        if self.shard not in _reduce_groups:
            ranks = dist.get_process_group_ranks(self.shard)
            # Collective over these ranks only. Other ranks may have no such unit and would never arrive.
            _reduce_groups[self.shard] = dist.new_group(ranks, use_local_synchronization=True)
        return replace(self, reduce=_reduce_groups[self.shard])

    @cached_property
    def ranks(self) -> int:
        """Return the number of ranks whose gradients are averaged."""
        return self.shard_size * self.replicate_size


# -- custom collectives --------------------------------------------------------------------------------------
# The protocol is the same as in torch: an object with ``allocate``, which returns every buffer that it
# communicates from or into, and ``__call__``. A unit allocates the buffer of each gather with it and drops
# the buffer after the copy-out. It writes this rank's part into that buffer first, so that the gather is in
# place. Any object with these methods is accepted; two kinds are built in (``BUILT_IN``).


class Comm(ABC):
    """A collective that allocates its own buffers."""

    @abstractmethod
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory to communicate from or into. Called at each use of a buffer, on the owner stream."""

    def register(self, *tensors: torch.Tensor) -> None:  # noqa: B027 - most memory needs nothing
        """Register memory with all ranks, if the kind of memory needs that."""


class AllGather(Comm):
    """An all-gather of equal 1-D shards. A subclass may override only the memory."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill ``output_tensor`` on the current stream. ``input_tensor`` is this rank's slice of it."""
        self.register(output_tensor)  # the input is a slice of it
        return all_gather(output_tensor, input_tensor, group, async_op)


class ReduceScatter(Comm):
    """A reduce-scatter of a 1-D tensor. A subclass may override only the memory."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce ``input_tensor`` by ``op`` into ``output_tensor``, on the current stream."""
        self.register(input_tensor, output_tensor)
        return reduce_scatter(output_tensor, input_tensor, group, op, async_op)


# -- calls and averaging -------------------------------------------------------------------------------------


def backend_name(group: ProcessGroup, device: torch.device) -> str:
    """Return the name of the backend of ``group`` for ``device`` (a group may have one per device type)."""
    names = dict(part.partition(":")[::2] for part in dist.get_backend_config(group).split(","))
    return names.get(device.type, dist.get_backend(group))


@dataclass(frozen=True)
class Averaging:
    """How to average over ranks: the reduce operation, and the divisors before and after it."""

    operation: Any
    before: float
    after: float


def may_overflow(dtype: torch.dtype) -> bool:
    """Return whether a sum of gradients may overflow in ``dtype``."""
    return dtype not in _WIDE


@lru_cache(maxsize=256)
def averaging(
    ranks: int,
    dtype: torch.dtype,
    *,
    native_average: bool,
    factor: float | None = None,
    force_sum: bool = False,
) -> Averaging:
    """Choose how to average over ``ranks``.

    In fp16, summing many gradients overflows and dividing them first underflows. So the divisor is split
    about evenly: a power of two before the sum and the rest after it. fp32 and bf16 have the range: the
    backend averages if it can; otherwise the sum is divided, because it has the fewest elements.

    Args:
        factor: divide by this instead of ``ranks``.
        native_average: whether the backend has ``ReduceOp.AVG``.
        force_sum: never use ``ReduceOp.AVG``.
    """
    divisor = float(ranks if factor is None else factor)
    if may_overflow(dtype):
        before = 1.0
        while divisor % before == 0 and divisor / before > before:
            before *= 2
        return Averaging(ReduceOp.SUM, before, divisor / before)
    if native_average and not force_sum and factor is None and ranks > 1:
        return Averaging(ReduceOp.AVG, 1.0, 1.0)
    return Averaging(ReduceOp.SUM, 1.0, divisor)


class Works(dist.Work):
    """Several collectives with one ``wait``."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, *timeout: timedelta) -> bool:
        """Block until all are done. Raises the error of the first one that failed."""
        for work in self._works:
            work.wait(*timeout)
        return True


def allocate(numel: int, dtype: torch.dtype, device: torch.device, custom: Comm | None) -> torch.Tensor:
    """Return ``numel`` uninitialised elements to communicate from or into, on the current stream."""
    if custom is not None:
        return custom.allocate((numel,), dtype=dtype, device=device)
    return torch.empty(numel, dtype=dtype, device=device)


def all_gather(
    output: torch.Tensor,
    shard: torch.Tensor,
    group: ProcessGroup,
    async_op: bool,
    custom: AllGather | None = None,
) -> dist.Work | None:
    """Gather equal 1-D shards into ``output`` in rank order. ``shard`` may be a slice of ``output``."""
    if custom is not None:
        return custom(output_tensor=output, input_tensor=shard, group=group, async_op=async_op)
    if async_op and gathers_by_copying(group, output.device):
        parts = list(output.view(group.size(), -1).unbind())
        own, parts[group.rank()] = parts[group.rank()], shard
        # The broadcast of this rank's part reads ``shard``; the copy to its place in ``output`` overlaps.
        works = gather_by_broadcasts(parts, group)
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)
        return works
    if _CALLS_GROUPS and not output.is_complex():
        work = group.all_gather_single(output, shard, _gather_options(async_op))
        return work if async_op else _finished(work)
    return _all_gather_single(output, shard, group=group, async_op=async_op)


@lru_cache(maxsize=256)
def served_by_gloo(group: ProcessGroup, device: torch.device) -> bool:
    """Return whether gloo runs the collectives of ``group`` for tensors on ``device``."""
    return backend_name(group, device) == "gloo"


@lru_cache(maxsize=256)
def averages(group: ProcessGroup, device: torch.device) -> bool:
    """Return whether the backend of ``group`` has ``ReduceOp.AVG`` for tensors on ``device``."""
    return backend_name(group, device) not in ("gloo", "mpi")


@lru_cache(maxsize=256)
def gathers_by_copying(group: ProcessGroup, device: torch.device) -> bool:
    """Return whether to all-gather by broadcasts: gloo's all-gather has an internal buffer and a copy-out.

    With many ranks its ring is faster despite the copy: a broadcast tree sends each part several times.
    """
    return served_by_gloo(group, device) and group.size() <= _FEW_RANKS


def gather_by_broadcasts(parts: Sequence[torch.Tensor], group: ProcessGroup) -> Works:
    """Broadcast ``parts``, one for each rank: the input of this rank and the outputs for the others."""
    return Works(
        [dist.broadcast(part, group=group, group_src=rank, async_op=True) for rank, part in enumerate(parts)]
    )


def reduce_scatter(
    output: torch.Tensor,
    source: torch.Tensor,
    group: ProcessGroup,
    operation: Any,
    async_op: bool,
    custom: ReduceScatter | None = None,
) -> dist.Work | None:
    """Reduce ``source`` (1-D: ranks x shard) and write this rank's shard to ``output``."""
    if custom is not None:
        return custom(output_tensor=output, input_tensor=source, group=group, op=operation)
    if _CALLS_GROUPS and not output.is_complex():
        work = group.reduce_scatter_single(output, source, _reduce_scatter_options(operation, async_op))
        return work if async_op else _finished(work)
    return _reduce_scatter_single(output, source, op=operation, group=group, async_op=async_op)


def all_gather_grouped(
    outputs: list[torch.Tensor], inputs: list[torch.Tensor], group: ProcessGroup, async_op: bool
) -> dist.Work | None:
    """Gather each input into its output in rank order, as one group of collectives."""
    work = group.allgather_into_tensor_coalesced(outputs, inputs, _gather_options(async_op))
    return work if async_op else _finished(work)


def reduce_scatter_grouped(
    outputs: list[torch.Tensor],
    inputs: list[torch.Tensor],
    group: ProcessGroup,
    operation: Any,
    async_op: bool,
) -> dist.Work | None:
    """Reduce each input and write this rank's part to its output, as one group of collectives."""
    options = _reduce_scatter_options(operation, async_op)
    work = group.reduce_scatter_tensor_coalesced(outputs, inputs, options)
    return work if async_op else _finished(work)


@lru_cache(maxsize=2)
def _gather_options(async_op: bool) -> AllgatherOptions:
    options = AllgatherOptions()
    options.asyncOp = async_op
    return options


@lru_cache(maxsize=16)
def _reduce_scatter_options(operation: Any, async_op: bool) -> ReduceScatterOptions:
    options = ReduceScatterOptions()
    options.reduceOp = operation
    options.asyncOp = async_op
    return options


def _finished(work: dist.Work | None) -> dist.Work | None:
    if work is not None:
        work.wait()  # with streams: the current stream waits if the work is on another one
    return None


def all_reduce(tensor: torch.Tensor, group: ProcessGroup, operation: Any, async_op: bool) -> dist.Work | None:
    """Reduce ``tensor`` in place. Every gradient goes through this module, so tests can count the calls."""
    return dist.all_reduce(tensor, op=operation, group=group, async_op=async_op)


def exchange_shards(received: torch.Tensor, sent: torch.Tensor, group: ProcessGroup) -> dist.Work | None:
    """Send every other rank its part of ``sent``, in rank order, and receive an equal part from each."""
    # Both tensors have (ranks - 1) equal parts and none for this rank.
    sizes = [sent.numel() // (group.size() - 1)] * group.size()
    sizes[group.rank()] = 0
    return dist.all_to_all_single(received, sent, sizes, sizes, group=group, async_op=True)


# The built-in custom collectives, both for NCCL.
#
# Memory of the process group allows zero-copy transfers; symmetric memory lets NCCL use copy engines.


class _FromGroup:
    """Memory from the allocator of the group's backend, if it has one."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        backend: Any = self._group._get_backend(device)
        if not backend.supports_tensor_alloc(device):
            return torch.empty(*size, dtype=dtype, device=device)
        return backend.allocate_tensor(math.prod(size), dtype=dtype, device=device)


class _Symmetric:
    """Symmetric memory, which all ranks of the group allocate alike. The constructor is collective."""

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
        """Rendezvous on the memory of ``tensors`` with all ranks of the group."""
        for tensor in tensors:
            self._symmetric.rendezvous(tensor, group=self._group.group_name)


class GroupAllGather(_FromGroup, AllGather):
    """The default all-gather, in memory of the process group."""


class GroupReduceScatter(_FromGroup, ReduceScatter):
    """The default reduce-scatter, in memory of the process group."""


class SymmetricAllGather(_Symmetric, AllGather):
    """The default all-gather, in symmetric memory, for which NCCL has faster algorithms."""


class SymmetricReduceScatter(_Symmetric, ReduceScatter):
    """The default reduce-scatter, in symmetric memory. NCCL supports only sums."""


# The collectives that the allocation settings install and may replace.
BUILT_IN = (GroupAllGather, GroupReduceScatter, SymmetricAllGather, SymmetricReduceScatter)
