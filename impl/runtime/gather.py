"""The ways from a unit's shard to its gathered parameters: one class each, of which ``choose_gather`` picks.

=============  ===========================  =============================================================
way            for                          the parameters are views of
=============  ===========================  =============================================================
``Gather``     one rank, no cast            the shard: nothing ever happens
``Cast``       one rank that casts          a buffer that the shard is cast into
``FromHost``   one rank with CPU offload    a buffer that the shard is copied into
``Flat``       FSDP1's flat layout          the output of the all-gather
``Packed``     a chunked layout             a buffer that one fused copy fills from the all-gather's output
``ByPeers``    the same, gloo, few ranks    a buffer; only what other ranks send passes through another one
``Grouped``    the same, large parameters   the outputs of their own all-gathers, issued as one call
=============  ===========================  =============================================================

``InSmallerGroup`` (``smaller_group.py``) and ``ByExtensions`` (``fsdp2/extended.py``) are two more. ``Unit``
has the states around them, and calls ``start``, ``finish``, ``fill`` and ``free`` in this order, or
``abandon`` after ``start``::

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
    """The things that a unit's gather depends on. Where one of them changes, the unit gets another gather.

    Attributes:
        layout: where everything is.
        shard: 1-D local shard of ``layout.shard_numel`` elements in the original dtype.
        device: what is computed on; the shard is there too unless it is offloaded.
        offload: how the shard is kept on the host, ``None`` if it is not.
        custom: gathers instead of the backend, in memory of its own.
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
        """Return whether the parameters are computed with in another dtype than they are stored in."""
        return self.precision.compute != self.precision.original


class Gather:
    """The gather of one unit; this base class is that of one rank without a cast."""

    # Whether gathering is work of other streams that computation waits for.
    fetches = False
    # Whether the gathered parameters have memory besides the shard's.
    owns_memory = False
    # Whether they are copied out of what was gathered, into memory of the stream of computation.
    copies_out = False
    # Whether they are views of one buffer, with version counters that nothing else moves.
    makes_views = True
    # Whether a part of them is kept from forward to backward: ``keep`` and ``show_kept``.
    keeps = False
    # Whether such a part is there, so that the next gather starts from it.
    holds = False

    def __init__(self, sharded: Sharded) -> None:
        self.sharded = sharded
        self.layout = sharded.layout
        self.work: Any = None
        # What was issued and is not waited for: the work of the backend, and its end on the stream.
        self.event: Event | None = None
        # Writes this rank's part to where the gather wants it, where that is not the shard itself.
        self.copy: ShardCopy | None = None
        self._full: FlatBuffer | None = None

    @property
    def nbytes(self) -> int:
        """Return bytes that gathering takes and freeing gives back."""
        return self.layout.full_numel * self.sharded.precision.compute.itemsize if self.owns_memory else 0

    def start(self, context: Context) -> None:
        """Issue the gather, from the shard as it is now."""

    def finish(self, context: Context) -> None:
        """Make computation wait for what ``start`` issued."""
        if self.work is not None:
            self.work.wait()
            self.work = None
            if self.copy is not None:
                self.copy.free()
        # Invariant: no forward or backward reads a buffer before computation waits for the gather that fills
        # it (tests/impl/values, mutant "no finish of the gather").
        if self.event is not None:
            context.streams.compute.wait(self.event)
            self.event = None

    def fill(self, context: Context, hold: int) -> None:
        """Fill the parameters' memory from what was gathered, on the stream of computation.

        Args:
            hold: how many gather buffers may stay allocated until the next one is waited for.
        """

    def memory(self) -> torch.Tensor:
        """Return the 1-D buffer that the parameters are views of."""
        return self.sharded.shard if self._full is None else self._full.tensor

    @torch.inference_mode(False)
    def make_parameters(self, parameters: Sequence[UnitParameter]) -> list[nn.Parameter]:
        """Make the gathered parameters over ``memory``, once; later gathers fill the same ones."""
        storage, made = self.memory(), list[nn.Parameter]()
        for segment, parameter in zip(self.layout.segments, parameters, strict=True):
            start = segment.full_offset if self.owns_memory else segment.shard_offset
            # Invariant: a parameter's version is moved by its unit alone, never by writes to the buffer, so
            # `.data` of each slice (tests/impl/values: a gather of equal values changes nothing to autograd).
            view = storage[start : start + segment.numel].view(segment.shape).data
            if parameter.whole is not None:
                view = parameter.whole.unsharded(view)
            made.append(nn.Parameter(view, requires_grad=parameter.requires_grad))
        return made

    def free(self, context: Context, hold: int) -> None:
        """Give the parameters' memory back; ``hold`` as in ``Handover.release``."""

    def abandon(self, context: Context) -> None:
        """Let a gather that was issued finish, and keep nothing of it."""

    def keep(self, context: Context) -> None:
        """Keep a part of the gathered parameters, which are freed next."""

    def show_kept(self, trained: Sequence[nn.Parameter]) -> None:
        """Let the modules show what ``keep`` kept; ``trained`` are the sharded parameters."""

    def drop(self) -> None:
        """Free what ``keep`` kept, where backward did not gather it."""

    def take_over(self, before: "Gather") -> bool:
        """Take over the parameters' memory from the gather ``before``; false where that is not possible."""
        if self.copies_out and before.copies_out:
            self._full = before._full
            return True
        return not self.owns_memory

    def take_full(self, context: Context) -> FlatBuffer:
        """Take the buffer of the parameters, where they are copied out of what was gathered."""
        if self._full is None:
            compute = context.streams.compute
            dtype = self.sharded.precision.compute
            self._full = FlatBuffer(self.layout.full_numel, dtype, self.sharded.device, compute)
        self._full.take()
        return self._full


class Cast(Gather):
    """One rank: the shard is cast to the dtype of computation."""

    owns_memory = True

    def fill(self, context: Context, hold: int) -> None:
        self.take_full(context).tensor.copy_(self.sharded.shard)

    def free(self, context: Context, hold: int) -> None:
        assert self._full is not None
        self._full.free()


class FromHost(Gather):
    """One rank with CPU offload: the shard is copied to the device, and cast on the way."""

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
        """Write the shard into the gather buffer or a buffer of its own; returns the copy's event."""
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
    """An all-gather whose output is the parameters."""

    def start(self, context: Context) -> None:
        streams, sharded = context.streams, self.sharded
        copy, custom, group = self.copy, sharded.custom, sharded.groups.shard
        assert group is not None
        # With events this rank's part is written to where the all-gather wants it, and needs no memory of its
        # own: the copy-in stream owns the gather buffer then. With record_stream a buffer that two streams
        # use comes back later than one that only computation uses: there the part has a small buffer instead.
        events = context.handover.mode is MemoryHandover.EVENTS
        in_place = copy is not None and (events or custom is not None)
        if copy is not None:
            streams.all_gather.wait(self._copy_shard(context, in_place))
        # Without a copy the shard itself is read: that computation wrote it is waited for once an iteration
        # (``Context.let_gathers_wait``), not at each gather.
        with streams.all_gather:
            if not in_place:
                self._take_gathered(context, streams.all_gather)
            assert self._gathered is not None
            source = sharded.shard if self._own_part is None else self._own_part
            self.work = comm.all_gather(self._gathered.tensor, source, group, not streams.has_streams, custom)
            if streams.has_streams:
                self.event = streams.all_gather.record()
        if custom is not None:
            self._own_part = None  # a part of memory that is dropped after the copy out
        if copy is not None and not in_place and streams.has_streams:
            # Memory of copy-in that the all-gather reads; without streams ``finish`` frees it.
            streams.all_gather.keep(source)
            copy.free()


class Packed(Flat):
    """An all-gather into a temporary buffer, out of which one fused copy fills the parameters."""

    copies_out = True
    _copy_out: CopyOut | None = None

    def fill(self, context: Context, hold: int) -> None:
        gathered = self._gathered
        assert gathered is not None
        if hold:
            # Held for the unit before: its owner waits from now on, behind this unit's gather.
            context.handover.trim()
        full = self.take_full(context)
        if self._copy_out is None:
            keeps = self.sharded.custom is None and self.sharded.device.type == "cpu"
            source = gathered.tensor if keeps else None
            self._copy_out = CopyOut(self.layout, full.tensor, source=source)
        self._copy_out(gathered.tensor)
        # Computation reads the gathered buffer last here: the next all-gather into it waits for this point.
        context.handover.release(gathered, context.streams.compute, hold)

    def free(self, context: Context, hold: int) -> None:
        assert self._full is not None
        self._full.free()
        context.limiter.freed(context.streams.compute)


class ByPeers(Packed):
    """A broadcast of each rank's shard, on gloo: this rank's part is copied to its places meanwhile.

    ::

        shard of rank 1     a1 b1 ──────────────copy───────────────> full: a0 a1 a2  b0 b1 b2
        received            a0 b0 | a2 b2   (of ranks 0 and 2) ──────────> ^     ^   ^     ^
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
        # Beside the broadcasts, which write ``received`` alone: this rank's part is in place when they end.
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
    """Each large parameter is gathered straight into its place; the small ones share a packed collective.

    A chunked layout cuts each parameter into rows, so what an all-gather *of that parameter alone* returns is
    the parameter. All are one call into the backend (``*_coalesced``), which NCCL runs as one group of one
    launch. On rank 1 of 2, with the large parameters a and b and the small ones c and d::

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
        """Return elements of the buffer: the parameters, and what is packed of all ranks behind them."""
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
                foreach_copy_(self._own, self._parts)  # one fused cast, to where the collectives read it
        if casts:
            streams.all_gather.follow(owner)  # the parts are cast on copy-in
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
    """Return the way of gathering for the layout, the group's backend and what else ``sharded`` says."""
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
