"""Collectives: which group, which call, which way on this backend, and how gradients are averaged.

Asynchronous work differs by device. Where there are streams a collective is queued on the current one and
the caller records an event; on the CPU it runs on the backend's threads and is waited for by its ``Work``.
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

# torch 2.13 renamed these two and warns at the old names; 2.11 and 2.12 know only the old ones.
_all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter_single: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)

# Whether a group's own methods are public (torch 2.13); what ``dist`` has around them is host time.
_CALLS_GROUPS = hasattr(ProcessGroup, "all_gather_single")

# Dtypes whose range holds any sum of gradients.
_WIDE = (torch.float32, torch.float64, torch.bfloat16)

# Up to here the ranks of a gloo group gather by broadcasts.
_FEW_RANKS = 4

# Groups made for reduce-scatters alone, one for each shard group as long as that lives.
_reduce_groups: MutableMapping[ProcessGroup, ProcessGroup] = WeakKeyDictionary()


@dataclass(frozen=True)
class UnitGroups:
    """The process groups of a unit: ``shard`` holds one copy of it, ``replicate`` holds equal shards.

    A group of one rank is ``None``: nothing is communicated over it. ``reduce`` has the ranks of ``shard``
    and is what reduce-scatters use: usually the same group, and so the same communicator.
    """

    shard: ProcessGroup | None
    shard_size: int
    shard_rank: int
    replicate: ProcessGroup | None = None
    replicate_size: int = 1
    reduce: ProcessGroup | None = None
    # Whether there are both, be they of one rank.
    hybrid: bool = False

    @classmethod
    def of(cls, shard: ProcessGroup | None, replicate: ProcessGroup | None = None) -> "UnitGroups":
        """Return those of process groups; ``None`` is a group of this rank alone."""
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
        """Return these groups with or without one for reduce-scatters alone. The first call is collective."""
        if self.shard is None or not separate:
            return replace(self, reduce=self.shard)
        if self.shard not in _reduce_groups:
            ranks = dist.get_process_group_ranks(self.shard)
            # Collective over these ranks alone: others may have no such unit, and must not be waited for.
            _reduce_groups[self.shard] = dist.new_group(ranks, use_local_synchronization=True)
        return replace(self, reduce=_reduce_groups[self.shard])

    @cached_property
    def ranks(self) -> int:
        """Return how many ranks have gradients that are averaged."""
        return self.shard_size * self.replicate_size


# -- collectives of the user's own ---------------------------------------------------------------------------
# The protocol is torch's: an object with ``allocate``, for every buffer that it communicates from or into,
# and ``__call__``. A unit that has one takes the buffer of each gather from it and drops it after the copy
# out. This rank's part is written into that buffer first, so that the gather is in place. Anything with the
# right methods will do; two kinds are built in (``BUILT_IN``).


class Comm(ABC):
    """A collective with memory of its own."""

    @abstractmethod
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory to communicate from or into; called once a use of a buffer, on its owner's stream."""

    def register(self, *tensors: torch.Tensor) -> None:  # noqa: B027 - most memory needs nothing
        """Make memory known to all ranks, where that is needed."""


class AllGather(Comm):
    """Gathers equal 1-D shards. A subclass that brings only memory makes the ordinary all-gather in it."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill ``output_tensor``, of which ``input_tensor`` is this rank's part, on the current stream."""
        self.register(output_tensor)  # the input is a part of it
        return all_gather(output_tensor, input_tensor, group, async_op)


class ReduceScatter(Comm):
    """Reduces a 1-D tensor and leaves each rank its part; the ordinary one if only memory is brought."""

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


# -- which call, and how averages are made -------------------------------------------------------------------


def backend_name(group: ProcessGroup, device: torch.device) -> str:
    """Return the backend that serves ``device`` in ``group`` (a group may have one a device type)."""
    names = dict(part.partition(":")[::2] for part in dist.get_backend_config(group).split(","))
    return names.get(device.type, dist.get_backend(group))


@dataclass(frozen=True)
class Averaging:
    """The steps from a sum over ranks to an average: the operation, and divisors before and after it."""

    operation: Any
    before: float
    after: float


def may_overflow(dtype: torch.dtype) -> bool:
    """Return whether a sum of gradients may leave the range of ``dtype``."""
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

    fp16 overflows when many gradients are summed and underflows when they are divided first, so the division
    is split about evenly (a power of two before). fp32 and bf16 have the range: the backend averages if it
    can, else the sum is divided, which touches the fewest elements.

    Args:
        factor: divide by this instead of ``ranks``.
        native_average: whether the backend has ``ReduceOp.AVG``.
        force_sum: never use the backend's average.
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
    """Several collectives that are waited for as one."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, *timeout: timedelta) -> bool:
        """Block until the last one is done. Raises what the first that failed raised."""
        for work in self._works:
            work.wait(*timeout)
        return True


def allocate(numel: int, dtype: torch.dtype, device: torch.device, custom: Comm | None) -> torch.Tensor:
    """Return ``numel`` elements to communicate from or into, uninitialised, on the current stream."""
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
    """Gather equal shards, 1-D, into ``output`` ordered by rank. ``shard`` may be a slice of it."""
    if custom is not None:
        return custom(output_tensor=output, input_tensor=shard, group=group, async_op=async_op)
    if async_op and gathers_by_copying(group, output.device):
        parts = list(output.view(group.size(), -1).unbind())
        own, parts[group.rank()] = parts[group.rank()], shard
        # The broadcast of this rank's part reads ``shard`` itself; it is copied to its place meanwhile.
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
    """Return whether gloo carries out this group's collectives on tensors of ``device``."""
    return backend_name(group, device) == "gloo"


@lru_cache(maxsize=256)
def averages(group: ProcessGroup, device: torch.device) -> bool:
    """Return whether this group's backend has ``ReduceOp.AVG`` for tensors of ``device``."""
    return backend_name(group, device) not in ("gloo", "mpi")


@lru_cache(maxsize=256)
def gathers_by_copying(group: ProcessGroup, device: torch.device) -> bool:
    """Return whether broadcasts are the better all-gather: gloo's fills memory of its own and copies it out.

    Among many ranks its ring is worth that copy: a broadcast is a tree, which sends each part several times.
    """
    return served_by_gloo(group, device) and group.size() <= _FEW_RANKS


def gather_by_broadcasts(parts: Sequence[torch.Tensor], group: ProcessGroup) -> Works:
    """Gather one tensor of each rank: ``parts`` by rank, this rank's to give and the others' to be filled."""
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
    """Sum or average ``source`` (ranks x shard, 1-D) and leave this rank's shard in ``output``."""
    if custom is not None:
        return custom(output_tensor=output, input_tensor=source, group=group, op=operation)
    if _CALLS_GROUPS and not output.is_complex():
        work = group.reduce_scatter_single(output, source, _reduce_scatter_options(operation, async_op))
        return work if async_op else _finished(work)
    return _reduce_scatter_single(output, source, op=operation, group=group, async_op=async_op)


def all_gather_grouped(
    outputs: list[torch.Tensor], inputs: list[torch.Tensor], group: ProcessGroup, async_op: bool
) -> dist.Work | None:
    """Gather each input into its output, ordered by rank, as one group of collectives."""
    work = group.allgather_into_tensor_coalesced(outputs, inputs, _gather_options(async_op))
    return work if async_op else _finished(work)


def reduce_scatter_grouped(
    outputs: list[torch.Tensor],
    inputs: list[torch.Tensor],
    group: ProcessGroup,
    operation: Any,
    async_op: bool,
) -> dist.Work | None:
    """Sum or average each input and leave this rank's part in its output, as one group of collectives."""
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
        work.wait()  # of streams: makes the current one wait, if the work is on another
    return None


def all_reduce(tensor: torch.Tensor, group: ProcessGroup, operation: Any, async_op: bool) -> dist.Work | None:
    """Sum or average ``tensor`` in place. Every gradient goes through this module, where tests count."""
    return dist.all_reduce(tensor, op=operation, group=group, async_op=async_op)


def exchange_shards(received: torch.Tensor, sent: torch.Tensor, group: ProcessGroup) -> dist.Work | None:
    """Send every other rank its part of ``sent``, in order of ranks, and receive as much from each."""
    # This rank has no part in either: (ranks - 1) equal parts, and none for itself.
    sizes = [sent.numel() // (group.size() - 1)] * group.size()
    sizes[group.rank()] = 0
    return dist.all_to_all_single(received, sent, sizes, sizes, group=group, async_op=True)


# The collectives with memory of their own that are built in, both for NCCL.
#
# Memory of the process group makes transfers without copies; symmetric memory lets NCCL use copy engines.


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


class GroupReduceScatter(_FromGroup, ReduceScatter):
    """The ordinary reduce-scatter, in memory of the process group."""


class SymmetricAllGather(_Symmetric, AllGather):
    """The ordinary all-gather, in symmetric memory, by which NCCL chooses its faster ways."""


class SymmetricReduceScatter(_Symmetric, ReduceScatter):
    """The ordinary reduce-scatter, in symmetric memory. NCCL has it for sums alone."""


# Those that one of the settings chooses, and another may replace.
BUILT_IN = (GroupAllGather, GroupReduceScatter, SymmetricAllGather, SymmetricReduceScatter)
