"""The kinds of gathers from a unit's shard to its parameters, one class each; ``choose_gather`` selects one.

=============  ===========================  =============================================================
class          used for                     the parameters are views of
=============  ===========================  =============================================================
``Gather``     one rank, no cast            the shard: gathering is a no-op
``Cast``       one rank that casts          a buffer that the shard is cast into
``FromHost``   one rank with CPU offload    a buffer that the shard is copied into
``Flat``       FSDP1's flat layout          the output of the all-gather
``Packed``     a chunked layout             a buffer that one fused copy fills from the all-gather's output
``ByPeers``    the same, gloo, few ranks    a buffer; only the parts of other ranks pass through another one
``Grouped``    the same, large parameters   the outputs of one all-gather per parameter, issued as one call
=============  ===========================  =============================================================

``InSmallerGroup`` (``smaller_group.py``) and ``ByExtensions`` (``fsdp2/extended.py``) are two more. ``Unit``
has the state machine. It calls ``start``, ``finish``, ``fill`` and ``free`` in this order, or ``abandon``
after ``start``::

    packed     shard --(cast)--> own part --all-gather--> gathered --fused copy--> parameters
    grouped    shard --(cast)--> its places in the parameters --all-gathers, one call--> parameters
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..collectives import comm
from ..shared.layout import CopyOut, UnitLayout, chunked_layout, places
from ..shared.settings import MemoryHandover, UnitPrecision
from ..shared.torch_internals import foreach_copy_
from .buffer import FlatBuffer, HostOffload, ShardCopy, make_buffer
from .context import Context
from .presentation import UnitParameter
from .streams import Event, Stream


@dataclass(frozen=True, eq=False)
class Sharded:
    """The inputs of a unit's gather. If one of them changes, the unit makes another gather.

    Attributes:
        layout: the layout of the parameters in the buffers.
        shard: 1-D local shard of ``layout.shard_numel`` elements in the original dtype.
        device: the device of computation, and of the shard unless it is offloaded.
        offload: the CPU offload of the shard, ``None`` without.
        custom: a custom all-gather, which allocates its own memory.
    """

    layout: UnitLayout
    shard: torch.Tensor
    groups: comm.UnitGroups
    precision: UnitPrecision
    device: torch.device
    offload: HostOffload | None = None
    custom: comm.AllGather | None = None

    @property
    def casts(self) -> bool:
        """Return whether the compute dtype differs from the dtype of the shard."""
        return self.precision.compute != self.precision.original


class Gather:
    """The gather of one unit. This base class is the gather of one rank without a cast."""

    # Whether gathering runs on other streams, so that the compute stream must wait.
    fetches = False
    # Whether the unsharded parameters have memory besides the shard.
    owns_memory = False
    # Whether a copy-out fills the parameters from the gather buffer, in memory of the compute stream.
    copies_out = False
    # Whether the parameters are views of one buffer, with version counters that only the unit changes.
    makes_views = True
    # Whether a larger shard is kept from forward to backward: ``keep`` and ``show_kept``.
    keeps = False
    # Whether there is a kept shard now, from which the next gather starts.
    holds = False

    def __init__(self, sharded: Sharded) -> None:
        self.sharded = sharded
        self.layout = sharded.layout
        self.work: Any = None
        # ``work`` and ``event`` of an issued gather, until ``finish`` waits for them.
        self.event: Event | None = None
        # Copies this rank's part to the input of the gather, if that is not the shard itself.
        self.copy: ShardCopy | None = None
        self._full: FlatBuffer | None = None

    @property
    def nbytes(self) -> int:
        """Return the bytes that gathering allocates and resharding frees."""
        return self.layout.full_numel * self.sharded.precision.compute.itemsize if self.owns_memory else 0

    def start(self, context: Context) -> None:
        """Issue the gather of the current shard."""

    def finish(self, context: Context) -> None:
        """Make the compute stream wait for the gather that ``start`` issued."""
        if self.work is not None:
            self.work.wait()
            self.work = None
            if self.copy is not None:
                self.copy.free()
        # Invariant: no forward or backward reads a buffer before the compute stream waits for the gather that
        # fills it (tests/impl/values, mutant "no finish of the gather").
        if self.event is not None:
            context.streams.compute.wait(self.event)
            self.event = None

    def fill(self, context: Context, hold: int) -> None:
        """Fill the parameters' memory from the gather buffer, on the compute stream.

        Args:
            hold: how many gather buffers may stay allocated until the next wait.
        """

    def memory(self) -> torch.Tensor:
        """Return the 1-D buffer that the parameters are views of."""
        return self.sharded.shard if self._full is None else self._full.tensor

    @torch.inference_mode(False)
    def make_parameters(self, parameters: Sequence[UnitParameter]) -> list[nn.Parameter]:
        """Make the unsharded parameters over ``memory``. Called once; later gathers fill the same objects."""
        storage, made = self.memory(), list[nn.Parameter]()
        for segment, parameter in zip(self.layout.segments, parameters, strict=True):
            start = segment.full_offset if self.owns_memory else segment.shard_offset
            # Invariant: only the unit changes a parameter's version, not writes to the buffer, hence `.data`
            # (tests/impl/values: for autograd a gather of equal values changes nothing).
            view = storage[start : start + segment.numel].view(segment.shape).data
            if parameter.whole is not None:
                view = parameter.whole.unsharded(view)
            made.append(nn.Parameter(view, requires_grad=parameter.requires_grad))
        return made

    def free(self, context: Context, hold: int) -> None:
        """Free the parameters' memory; ``hold`` as in ``Handover.release``."""

    def abandon(self, context: Context) -> None:
        """Wait for an issued gather and drop its result."""

    def keep(self, context: Context) -> None:
        """Keep a larger shard of the unsharded parameters, which are freed next."""

    def show_kept(self, trained: Sequence[nn.Parameter]) -> None:
        """Make the modules show the kept shard; ``trained`` are the sharded parameters."""

    def drop(self) -> None:
        """Free the kept shard, if there is one."""

    def take_over(self, before: "Gather") -> bool:
        """Take over the parameters' memory from the gather ``before``; return False if not possible."""
        if self.copies_out and before.copies_out:
            self._full = before._full
            return True
        return not self.owns_memory

    def take_full(self, context: Context) -> FlatBuffer:
        """Allocate and return the buffer of the parameters that the copy-out or cast fills."""
        if self._full is None:
            compute = context.streams.compute
            dtype = self.sharded.precision.compute
            self._full = FlatBuffer(self.layout.full_numel, dtype, self.sharded.device, compute)
        self._full.take()
        return self._full


class Cast(Gather):
    """One rank: casts the shard to the compute dtype."""

    owns_memory = True

    def fill(self, context: Context, hold: int) -> None:
        self.take_full(context).tensor.copy_(self.sharded.shard)

    def free(self, context: Context, hold: int) -> None:
        assert self._full is not None
        self._full.free()


class FromHost(Gather):
    """One rank with CPU offload: copies the shard to the device and casts it."""

    fetches = owns_memory = True

    def __init__(self, sharded: Sharded) -> None:
        super().__init__(sharded)
        self._gathered: FlatBuffer | None = None
        self._own_part: torch.Tensor | None = None
        if sharded.casts or sharded.custom is not None or sharded.offload is not None:
            dtypes = (sharded.precision.original, sharded.precision.compute)
            from_host = sharded.offload is not None
            self.copy = ShardCopy(self.layout.shard_numel, dtypes, sharded.device, from_host)

    @property
    def numel(self) -> int:
        """Return elements of the gather buffer."""
        return self.layout.gathered_numel

    def start(self, context: Context) -> None:
        self.event = self._copy_shard(context, in_place=True)

    def _copy_shard(self, context: Context, in_place: bool) -> Event | None:
        """Copy the shard into the gather buffer, or into a separate one, and return the copy's event."""
        copy, stream, sharded = self.copy, context.streams.copy_in, self.sharded
        assert copy is not None
        with stream:
            buffer = self._take_gathered(context, stream) if in_place else copy.take(stream)
            if self._own_part is None or sharded.custom is not None:
                start = self.layout.rank * self.layout.shard_numel if in_place else 0
                self._own_part = buffer.tensor[start : start + self.layout.shard_numel]
            copy.write(self._own_part, sharded.shard, stream)
            event = stream.record()
        if sharded.offload is not None:
            context.host_reads[stream] = event
        return event

    def _take_gathered(self, context: Context, owner: Stream) -> FlatBuffer:
        if self._gathered is None:
            sharded = self.sharded
            dtype = sharded.precision.compute
            self._gathered = make_buffer(self.numel, dtype, sharded.device, owner, sharded.custom)
        if context.handover.held:
            context.handover.reclaim(self._gathered)
        self._gathered.take()
        return self._gathered

    def memory(self) -> torch.Tensor:
        buffer = self._gathered if self._full is None else self._full
        assert buffer is not None
        return buffer.tensor

    def free(self, context: Context, hold: int) -> None:
        assert self._gathered is not None
        compute = context.streams.compute
        context.handover.release(self._gathered, compute, hold)
        context.limiter.freed(compute)

    def abandon(self, context: Context) -> None:
        self.finish(context)
        assert self._gathered is not None
        context.handover.release(self._gathered, context.streams.compute)


class Flat(FromHost):
    """An all-gather straight into the parameters' memory."""

    def start(self, context: Context) -> None:
        streams, sharded = context.streams, self.sharded
        copy, custom, group = self.copy, sharded.custom, sharded.groups.shard
        assert group is not None
        # With events, this rank's part is written in place into the gather buffer, which copy-in then owns.
        # With record_stream, a buffer that two streams use is freed later than one that only compute uses, so
        # the part gets a small separate buffer.
        events = context.handover.mode is MemoryHandover.EVENTS
        in_place = copy is not None and (events or custom is not None)
        if copy is not None:
            streams.all_gather.wait(self._copy_shard(context, in_place))
        # Without a copy, the all-gather reads the shard. It waits for the compute stream, which wrote the
        # shard, once an iteration (``Context.let_gathers_wait``), not at each gather.
        with streams.all_gather:
            if not in_place:
                self._take_gathered(context, streams.all_gather)
            assert self._gathered is not None
            source = sharded.shard if self._own_part is None else self._own_part
            self.work = comm.all_gather(self._gathered.tensor, source, group, not streams.has_streams, custom)
            if streams.has_streams:
                self.event = streams.all_gather.record()
        if custom is not None:
            self._own_part = None  # a view of memory that is dropped after the copy-out
        if copy is not None and not in_place and streams.has_streams:
            # The all-gather reads memory that copy-in owns; without streams ``finish`` frees it.
            streams.all_gather.keep(source)
            copy.free()


class Packed(Flat):
    """An all-gather into a temporary buffer, from which one fused copy-out fills the parameters."""

    copies_out = True
    _copy_out: CopyOut | None = None

    def fill(self, context: Context, hold: int) -> None:
        gathered = self._gathered
        assert gathered is not None
        if hold:
            # Free the buffer held for the unit before: its owner now waits after this unit's gather.
            context.handover.trim()
        full = self.take_full(context)
        if self._copy_out is None:
            keeps = self.sharded.custom is None and self.sharded.device.type == "cpu"
            source = gathered.tensor if keeps else None
            self._copy_out = CopyOut(self.layout, full.tensor, source=source)
        self._copy_out(gathered.tensor)
        # The copy-out is the last read of the gather buffer; the next all-gather waits for this point.
        context.handover.release(gathered, context.streams.compute, hold)

    def free(self, context: Context, hold: int) -> None:
        assert self._full is not None
        self._full.free()
        context.limiter.freed(context.streams.compute)


class ByPeers(Packed):
    """A broadcast of each rank's shard, on gloo. The copy of this rank's part to its places overlaps.

    ::

        shard of rank 1     a1 b1 ──────────────copy───────────────> full: a0 a1 a2  b0 b1 b2
        received            a0 b0 | a2 b2   (from ranks 0 and 2) ────────> ^     ^   ^     ^
    """

    _received: torch.Tensor | None = None

    def start(self, context: Context) -> None:
        layout, mine, group = self.layout, self.layout.rank, self.sharded.groups.shard
        assert group is not None
        if self.copy is not None:
            context.streams.all_gather.wait(self._copy_shard(context, in_place=False))
        shard = self.sharded.shard if self._own_part is None else self._own_part
        full = self.take_full(context).tensor
        self._received = received = shard.new_empty(layout.world_size - 1, layout.shard_numel)
        by_rank = [*received[:mine].unbind(), shard, *received[mine:].unbind()]
        self.work = comm.gather_by_broadcasts(by_rank, group)
        parts = shard.split([segment.shard_padded_numel for segment in layout.segments])
        # This copy overlaps with the broadcasts, which only write to ``received``.
        foreach_copy_([whole[mine] for whole in places(layout, full)], parts)

    def fill(self, context: Context, hold: int) -> None:
        received, mine = self._received, self.layout.rank
        assert received is not None
        wholes = places(self.layout, self.take_full(context).tensor)
        for rows, out in (
            (received[:mine], [whole[:mine] for whole in wholes]),
            (received[mine:], [whole[mine + 1 :] for whole in wholes]),
        ):
            if len(rows):
                torch.split_with_sizes_copy(rows, self.layout.split_sizes, dim=1, out=out)
        self._received = None

    def abandon(self, context: Context) -> None:
        self.finish(context)
        self.take_full(context).free()


class Grouped(Flat):
    """One all-gather into each large parameter in place, and a packed one for all small parameters.

    A chunked layout shards each parameter by rows, so the output of an all-gather *of one parameter* is the
    parameter itself. All all-gathers are one call into the backend (``*_coalesced``), which NCCL runs as one
    group with one launch. On rank 1 of 2, with large parameters a and b and small ones c and d::

        shard      a1 b1 c1 d1
                   |  |  +--+-----------------------------+
        buffer     a0 a1   b0 b1   c0 c1   d0 d1 |  c0 d0 | c1 d1
                   ^^^^^   ^^^^^   parameters    |  packed: copied to c and d
    """

    def __init__(self, sharded: Sharded) -> None:
        super().__init__(sharded)
        layout = self.layout
        self._large, small = layout.segments[: layout.grouped], layout.segments[layout.grouped :]
        self._packed: UnitLayout | None = None
        self._sizes = [segment.shard_padded_numel for segment in self._large]
        if small:
            shapes = [segment.shape for segment in small]
            packed = chunked_layout(shapes, layout.world_size, layout.rank)
            self._packed = packed.placed([segment.full_offset for segment in small])
            self._sizes.append(layout.shard_numel - sum(self._sizes))
        self._outputs: list[torch.Tensor] = []
        self._own: list[torch.Tensor] = []
        self._parts: list[torch.Tensor] = []
        self._copy_out: CopyOut | None = None

    @property
    def numel(self) -> int:
        """Return the elements of the buffer: the parameters, then the output of the packed all-gather."""
        return self.layout.full_numel + (0 if self._packed is None else self._packed.gathered_numel)

    def start(self, context: Context) -> None:
        streams, casts = context.streams, self.sharded.casts
        group = self.sharded.groups.shard
        assert group is not None
        owner = streams.copy_in if casts else streams.all_gather
        with owner:
            buffer = self._take_gathered(context, owner).tensor
            if not self._outputs:
                self._make_views(buffer)
            if casts:
                foreach_copy_(self._own, self._parts)  # one fused cast into the inputs of the collectives
        if casts:
            streams.all_gather.follow(owner)  # copy-in casts the inputs
        with streams.all_gather:
            inputs = self._own if casts else self._parts
            self.work = comm.all_gather_grouped(self._outputs, inputs, group, not streams.has_streams)
            self.event = streams.all_gather.record()

    def _make_views(self, buffer: torch.Tensor) -> None:
        ranks = self.layout.world_size
        self._outputs = [
            buffer[segment.full_offset : segment.full_offset + segment.shard_padded_numel * ranks]
            for segment in self._large
        ]
        self._parts = list(self.sharded.shard.split(self._sizes))
        if self._packed is not None:
            self._outputs.append(buffer[self.layout.full_numel :])
            self._copy_out = CopyOut(self._packed, buffer)
        self._own = [output.view(ranks, -1)[self.layout.rank] for output in self._outputs]

    def fill(self, context: Context, hold: int) -> None:
        if self._copy_out is not None:
            self._copy_out(self._outputs[-1])


MakeGather = Callable[[Sharded], Gather]


def choose_gather(sharded: Sharded) -> "Gather":
    """Choose the gather by the layout, the backend of the group and the rest of ``sharded``."""
    group, layout, usual = sharded.groups.shard, sharded.layout, sharded.custom is None
    if group is None:
        if sharded.offload is not None:
            return FromHost(sharded)
        return Cast(sharded) if sharded.casts else Gather(sharded)
    if not layout.rank_major:
        return Flat(sharded)
    if usual and layout.grouped and sharded.offload is None:
        return Grouped(sharded)
    if usual and not layout.interleaved and comm.gathers_by_copying(group, sharded.device):
        return ByPeers(sharded)
    return Packed(sharded)
