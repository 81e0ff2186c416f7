"""The memory of one unit's gathered parameters, and how they come from the shard into it.

Ways to get from the shard to the parameters, by layout (``layout.py``) and by who serves the collective:

* one rank, no cast: the parameters are views of the shard; nothing ever happens;
* one rank and a cast or CPU offload, or a flat layout: the parameters are views of what is cast, copied or
  gathered;
* a chunked layout, *grouped*: each large parameter is gathered straight into its place (``grouped.py``);
* a chunked layout, *packed*: the gather buffer is temporary and one fused copy fills the parameters;
* gloo among few ranks: only what peers send passes through a buffer (``peer_gather.py``).

::

    packed     shard --(cast)--> own part --all-gather--> gathered --fused copy--> parameters
    grouped    shard --(cast)--> its places in the parameters --all-gathers, one call--> parameters
"""

from __future__ import annotations

from typing import Any

import torch

from ..collectives import comm
from ..collectives.custom_comm import AllGather
from ..collectives.grouped import GroupedGather
from ..collectives.peer_gather import PeerGather
from ..shared.copy_out import CopyOut
from ..shared.layout import UnitLayout
from ..shared.settings import MemoryHandover, UnitPrecision
from .buffer import FlatBuffer, make_buffer
from .context import Context
from .offload import HostOffload, ShardCopy
from .streams import Event, Stream


class Gathering:
    """See the head of this file; ``Unit`` has the states around it.

    Args:
        layout: where everything is.
        shard: 1-D local shard of ``layout.shard_numel`` elements in the original dtype.
        device: what is computed on; the shard is there too unless it is offloaded.
        offload: how the shard is kept on the host, ``None`` if it is not.
    """

    def __init__(
        self,
        name: str,
        layout: UnitLayout,
        shard: torch.Tensor,
        groups: comm.UnitGroups,
        precision: UnitPrecision,
        device: torch.device,
        offload: HostOffload | None,
    ) -> None:
        self.name = name
        self.layout = layout
        self.shard = shard
        self.groups = groups
        self.device = device
        self.offload = offload
        self.gathers = groups.shard is not None
        """Whether unsharding needs a collective."""
        self.fetches = self.gathers or offload is not None
        """Whether unsharding is work of other streams that computation waits for."""
        self._context: Context | None = None
        self.custom_gather: AllGather | None = None
        """What gathers instead of the backend, in memory of its own."""
        self._gathered: FlatBuffer | None = None
        self._full: FlatBuffer | None = None
        self._work: Any = None
        self._event: Event | None = None
        self._copy_out: CopyOut | None = None
        self._own_part: torch.Tensor | None = None
        self._use_precision(precision)

    @property
    def unsharded_bytes(self) -> int:
        """Bytes that unsharding this unit takes and resharding frees."""
        return self.layout.full_numel * self.precision.compute.itemsize if self.owns_memory else 0

    @property
    def context(self) -> Context:
        """What this unit shares with the other units of its tree."""
        if self._context is None:
            raise RuntimeError(
                f"unit '{self.name}' has not run yet: call the root module's forward (or unshard()) first"
            )
        return self._context

    def _use_precision(self, precision: UnitPrecision) -> None:
        self.precision = precision
        self.casts = precision.compute != precision.original
        """Whether the parameters are computed with in another dtype than they are stored in."""
        self.owns_memory = self.fetches or self.casts
        """Whether the unsharded parameters have memory besides the shard's."""
        self._choose_copy()

    def _choose_copy(self) -> None:
        """Whether the shard is copied before it is gathered, and by what."""
        precision = self.precision
        self._shard_copy: ShardCopy | None = None
        custom = self.custom_gather is not None
        if self.fetches and (self.casts or custom or self.offload is not None):
            dtypes = (precision.original, precision.compute)
            from_host = self.offload is not None
            self._shard_copy = ShardCopy(self.layout.shard_numel, dtypes, self.device, from_host)
        self._grouped = None if custom else self._grouped_gather()
        self._by_peers = None if custom or self._grouped is not None else self._peer_gather()

    def _grouped_gather(self) -> GroupedGather | None:
        """What gathers large parameters into place, where the layout has any."""
        group, layout = self.groups.shard, self.layout
        if group is None or not layout.grouped or self.offload is not None:
            return None
        return GroupedGather(layout, group)

    def _peer_gather(self) -> PeerGather | None:
        """What gathers instead of the backend, where that copies too much."""
        group, layout = self.groups.shard, self.layout
        if group is None or not layout.rank_major or layout.interleaved:
            return None
        return PeerGather(layout, group) if comm.gathers_by_copying(group, self.device) else None

    # -- gather ----------------------------------------------------------------------------------------------

    def _issue_all_gather(self) -> None:
        if self._grouped is not None:
            self._issue_grouped(self._grouped)
            return
        context, group = self.context, self.groups.shard
        streams = context.streams
        assert group is not None
        # With events this rank's part is written to where the all-gather wants it, and needs no memory of its
        # own: the copy-in stream owns the gather buffer then. With record_stream a buffer that two streams
        # use comes back later than one that only computation uses: there the part has a small buffer instead.
        copy = self._shard_copy
        custom = self.custom_gather
        events = context.handover.mode is MemoryHandover.EVENTS
        in_place = copy is not None and (events or custom is not None) and self._by_peers is None
        if copy is not None:
            streams.all_gather.wait(self._copy_shard(in_place))
        if self._by_peers is not None:
            source = self.shard if self._own_part is None else self._own_part
            self._work = self._by_peers.start(self._take_full().tensor, source)
            return
        with streams.all_gather:
            if not in_place:
                self._take_gathered(streams.all_gather)
            assert self._gathered is not None
            source = self.shard if self._own_part is None else self._own_part
            self._work = comm.all_gather(
                self._gathered.tensor, source, group, not streams.has_streams, custom
            )
            self._event = streams.all_gather.record()
        if custom is not None:
            self._own_part = None  # a part of memory that is dropped after the copy out
        if copy is not None and not in_place and streams.has_streams:
            streams.all_gather.keep(source)
            copy.free()

    def _issue_grouped(self, grouped: GroupedGather) -> None:
        streams = self.context.streams
        casts = self._shard_copy is not None
        owner = streams.copy_in if casts else streams.all_gather
        with owner:
            grouped.bind(self._take_gathered(owner).tensor, self.shard)
            if casts:
                grouped.cast()
        if casts:
            streams.all_gather.follow(owner)
        with streams.all_gather:
            self._work = grouped.start(in_place=casts, async_op=not streams.has_streams)
            self._event = streams.all_gather.record()

    def _copy_shard(self, in_place: bool) -> Event | None:
        """Write the shard into the gather buffer or a buffer of its own, on the cast stream; returns its
        event.
        """
        copy, cast = self._shard_copy, self.context.streams.copy_in
        assert copy is not None
        with cast:
            buffer = self._take_gathered(cast) if in_place else copy.take(cast)
            if self._own_part is None or self.custom_gather is not None:
                start = self.layout.rank * self.layout.shard_numel if in_place else 0
                self._own_part = buffer.tensor[start : start + self.layout.shard_numel]
            copy.write(self._own_part, self.shard, cast)
            event = cast.record()
        if self.offload is not None:
            self.context.host_reads[cast] = event
        return event

    def _take_gathered(self, owner: Stream) -> FlatBuffer:
        if self._gathered is None:
            numel, dtype = self.layout.gathered_numel, self.precision.compute
            if self._grouped is not None:
                numel = self._grouped.numel
            self._gathered = make_buffer(numel, dtype, self.device, owner, self.custom_gather)
        else:
            self.context.handover.reclaim(self._gathered)
            self._gathered.take()
        return self._gathered

    def _finish_gather(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None
            if self._shard_copy is not None:
                self._shard_copy.free()
        self.context.streams.compute.wait(self._event)
        self._event = None

    def _take_full(self) -> FlatBuffer:
        if self._full is None:
            self._full = FlatBuffer(
                self.layout.full_numel, self.precision.compute, self.device, self.context.streams.compute
            )
        else:
            self._full.take()
        return self._full

    def _copy_out_parameters(self, hold: int) -> None:
        context, gathered = self.context, self._gathered
        assert gathered is not None
        if hold:
            context.handover.trim()
        full = self._take_full()
        if self._copy_out is None:
            keeps = self.custom_gather is None and self.device.type == "cpu"
            source = gathered.tensor if keeps else None
            self._copy_out = CopyOut(self.layout, full.tensor, source=source)
        self._copy_out(gathered.tensor)
        context.handover.release(gathered, context.streams.compute, hold)

    def _parameter_memory(self) -> torch.Tensor:
        if not self.owns_memory:
            return self.shard
        buffer = self._full if self._full is not None else self._gathered
        assert buffer is not None
        return buffer.tensor

    # -- give back -------------------------------------------------------------------------------------------

    def _free_parameters(self, hold: int) -> None:
        if not self.owns_memory:
            return
        context = self.context
        if self._full is not None:
            self._full.free()
        else:
            assert self._gathered is not None
            context.handover.release(self._gathered, context.streams.compute, hold)
        if self.fetches:
            context.limiter.freed(context.streams.compute)
