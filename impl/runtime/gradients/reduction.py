"""From the gradients of one unit's backward to sharded gradients.

::

    compute      [backward of unit 2]       [backward of unit 1]
    reduce                           [copy in][reduce-scatter] ............ (cast, deliver)
    all_reduce                                                [all-reduce] (cast, deliver)

The copy in is one fused operation: it lays all gradients into the collective's input, rank-major where the
layout is chunked, and casts to the reduce dtype on the way. It runs on the reduce stream, beside the next
unit's backward; the gradients are kept until it is done. The result of the collective *is* the memory of the
sharded gradients, unless they are delivered in another dtype.

On the CPU a collective runs on the backend's threads; what follows it (sum, division, delivery) is done when
a later unit is reduced or backward ends, in the order of issue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from ...collectives import comm
from ...collectives.comm_hooks import CommHook
from ...collectives.exchange import Exchange
from ...shared.annotations import span
from ...shared.settings import MemoryHandover
from ..gradient_state import PartialSum
from ..streams import Event, Stream, Streams
from ..unit import Unit
from .delivery import deliver_local, drops_output
from .grouped import GroupedReduce, groups_gradients
from .laying_out import concatenate, prepare
from .lent import LentMemory
from .pieces import PieceReduce
from .plans import Plan, plan_of
from .returns import GradientReturns

_MOST_IN_FLIGHT = 2
"""On the CPU: collectives whose results are not yet delivered. One runs, one waits for its turn."""


class _Reduction:
    """One unit's reduction: what is in flight and what is left to do."""

    __slots__ = (
        "average",
        "divisor",
        "exchange",
        "grouped",
        "offsets",
        "output",
        "source",
        "unit",
        "which",
        "work",
    )

    def __init__(
        self,
        unit: Unit,
        which: Sequence[int],
        offsets: Sequence[int],
        source: torch.Tensor,
        average: comm.Averaging,
    ) -> None:
        self.unit = unit
        self.which = which
        self.offsets = offsets
        self.source = source
        self.output = source
        self.average = average
        self.divisor = average.after
        """What is left to divide by."""
        self.exchange: Exchange | None = None
        self.grouped: GroupedReduce | PieceReduce | None = None
        """What has several collectives: of single gradients, or of pieces."""
        self.work: Any = None


class Reducer:
    """Reduces the gradients of a tree of units."""

    def __init__(self, streams: Streams, mode: MemoryHandover) -> None:
        self._streams = streams
        self.in_flight: deque[_Reduction] = deque()
        """Without streams: what ``finish`` waits for."""
        self._returns = GradientReturns(streams, mode)
        self.lent = LentMemory(streams, mode)
        self._last: dict[Stream, Event | None] = {}
        self._plans: dict[tuple[Unit, tuple[int, ...]], Plan] = {}

    # -- entry points ----------------------------------------------------------------------------------------

    def begin_stage(self, units: Sequence[Unit]) -> None:
        """``units`` of one stage will be reduced: what earlier ones lent is taken back."""
        if self._streams.has_streams:
            self.lent.take_back(max(unit.gradients.held for unit in units) - 1)

    def reduce(self, unit: Unit, which: tuple[int, ...], gradients: list[torch.Tensor]) -> None:
        """Reduce ``gradients`` of the parameters ``which`` and deliver the result to the unit's presentation.

        The list is emptied: nothing else may keep gradients that are kept only until they are copied.
        """
        state = unit.gradients
        local = unit.groups.ranks == 1 and unit.offload is None
        if local and state.comm_hook is None and state.all_reduce_hook is None:
            deliver_local(unit, which, gradients)
            return
        stream = self._streams.reduce_scatter if unit.gathers else self._streams.all_reduce
        with span(unit.labels.reduce_scatter if unit.gathers else unit.labels.all_reduce):
            average = self._averaging(unit)
            source = self._input(unit, which, average)
            stream.follow(self._streams.compute)
            with stream:
                reduction = self._copy_in(unit, which, gradients, average, source)
                if reduction.grouped is None:
                    self.lent.lend_gradients(gradients, stream, copied=True)
                self._start(reduction)
                self.lent.lend_gradients(gradients, stream)  # whatever the collectives themselves read
                self.lent.lend_input(source, stream)
        if self._streams.has_streams or (unit.gathers and unit.groups.replicate is not None):
            # With replicas a second collective follows: all ranks must issue the two in one order.
            self._complete(reduction)
        else:
            self.in_flight.append(reduction)
            while len(self.in_flight) > _MOST_IN_FLIGHT:
                self._complete(self.in_flight.popleft())

    def reduce_partial(self, unit: Unit) -> None:
        """Hybrid sharding: sum over replicas what earlier passes left, after one without gradients."""
        partial, unit.gradients.partial = unit.gradients.partial, None
        assert partial is not None
        average = self._averaging(unit)
        self._complete(_Reduction(unit, partial.which, partial.offsets, partial.parts, average))

    def finish(self) -> None:
        """Deliver everything and make computation wait for it: the end of backward."""
        while self.in_flight:
            self._complete(self.in_flight.popleft())
        for event in self._last.values():
            self._streams.compute.wait(event)
        self._last.clear()
        self._returns.finish()
        self.lent.finish()

    def discard(self) -> None:
        """Wait for what is in flight and deliver nothing: the iteration failed."""
        for reduction in self.in_flight:
            if reduction.work is not None:
                reduction.work.wait()
        self.in_flight.clear()
        self._returns.discard()
        self.finish()

    # -- the steps of one reduction --------------------------------------------------------------------------

    def _input(self, unit: Unit, which: tuple[int, ...], average: comm.Averaging) -> torch.Tensor | None:
        """Memory of computation for what a collective reads: activations that backward freed, mostly.

        ``None`` where the collective's own stream allocates it, or where it reads the gradients themselves.
        """
        if not self.lent.lends_inputs or not unit.gathers or unit.gradients.replaced:
            return None  # without shards it becomes the gradient
        if groups_gradients(unit, average) or self._pieces(unit, which, average):
            return None
        return torch.empty(self._plan(unit, which).numel, dtype=unit.precision.reduce, device=unit.device)

    def _copy_in(
        self,
        unit: Unit,
        which: tuple[int, ...],
        gradients: list[torch.Tensor],
        average: comm.Averaging,
        source: torch.Tensor | None,
    ) -> _Reduction:
        if groups_gradients(unit, average):
            grouped = GroupedReduce(unit, which, gradients)
            reduction = _Reduction(unit, which, grouped.offsets, grouped.output, average)
            reduction.grouped = grouped
            return reduction
        plan, layout = self._plan(unit, which), unit.layout
        offsets, numel = plan.offsets, plan.numel
        pieces = self._pieces(unit, which, average)
        if pieces:
            reduction = _Reduction(unit, which, offsets, gradients[0], average)
            reduction.grouped = PieceReduce(unit, which, gradients, pieces)
            reduction.source = reduction.output = reduction.grouped.output
            return reduction
        if plan.prepares:
            gradients = prepare(layout, which, gradients)
        if self._exchanges(unit):
            shard_numel = numel // layout.world_size
            dtype = unit.precision.reduce
            exchange = Exchange(layout, gradients, offsets, shard_numel, dtype, average.before)
            reduction = _Reduction(unit, which, offsets, exchange.sent, average)
            reduction.exchange = exchange
            return reduction
        hook = unit.gradients.comm_hook
        dtype = unit.precision.compute if hook is not None and hook.compresses else unit.precision.reduce
        if source is None:
            source = comm.allocate(numel, dtype, unit.device, unit.gradients.reduce_scatter)
        if plan.used < numel:
            source[plan.used :].zero_()
        rows = layout.world_size if layout.rank_major else 1
        concatenate(layout, gradients, source[: plan.used].view(rows, -1))
        if average.before != 1:
            source.div_(average.before)
        return _Reduction(unit, which, offsets, source, average)

    def _pieces(self, unit: Unit, which: tuple[int, ...], average: comm.Averaging) -> Sequence[range]:
        """The pieces in which a large unit is reduced; none where it is as a whole."""
        if not self._streams.has_streams or average.before != 1 or unit.gradients.replaced:
            return ()
        return self._plan(unit, which).pieces

    def _averaging(self, unit: Unit) -> comm.Averaging:
        groups, state = unit.groups, unit.gradients
        if state.comm_hook is not None:
            return comm.Averaging(None, 1.0, 1.0)
        return comm.averaging(
            groups.ranks,
            unit.precision.reduce,
            native_average=self._streams.has_streams,
            factor=state.divide_factor,
            force_sum=state.force_sum or (groups.replicate is not None and state.divide_factor is not None),
        )

    def _exchanges(self, unit: Unit) -> bool:
        """Whether the reduce-scatter is better done by an exchange (``exchange.py``)."""
        group = unit.groups.reduce
        if group is None or self._streams.has_streams:
            return False
        return not unit.gradients.replaced and comm.served_by_gloo(group, unit.device)

    def _plan(self, unit: Unit, which: tuple[int, ...]) -> Plan:
        key = (unit, which)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = plan_of(unit, which)
        return plan

    def _start(self, reduction: _Reduction) -> None:
        unit, streams = reduction.unit, self._streams
        groups, state = unit.groups, unit.gradients
        if state.comm_hook is not None:
            _run_hook(reduction, state.comm_hook)
            return
        if groups.shard is not None:
            self._start_reduce_scatter(reduction)
        elif groups.replicate is not None:
            reduction.work = comm.all_reduce(
                reduction.source, groups.replicate, reduction.average.operation, not streams.has_streams
            )

    def _start_reduce_scatter(self, reduction: _Reduction) -> None:
        unit, source = reduction.unit, reduction.source
        group = unit.groups.reduce
        assert group is not None
        if reduction.exchange is not None:
            reduction.work = reduction.exchange.start(group)
            return
        if reduction.grouped is not None:
            synchronous = self._streams.has_streams
            reduction.work = reduction.grouped.start(group, reduction.average.operation, not synchronous)
            return
        numel = source.numel() // unit.groups.shard_size
        custom = unit.gradients.reduce_scatter
        operation = reduction.average.operation
        reduction.output = comm.allocate(numel, source.dtype, source.device, custom)
        async_op = not self._streams.has_streams and custom is None
        reduction.work = comm.reduce_scatter(reduction.output, source, group, operation, async_op, custom)

    def _complete(self, reduction: _Reduction) -> None:
        unit, streams = reduction.unit, self._streams
        owner = stream = streams.reduce_scatter if unit.groups.shard is not None else streams.all_reduce
        if reduction.work is not None:
            with stream:
                reduction.work.wait()
            reduction.work = None
        if reduction.exchange is not None:
            reduction.output = reduction.exchange.finish()
            reduction.exchange = None
        reduction.grouped = None
        if unit.groups.shard is not None and unit.groups.replicate is not None:
            with stream:
                if not self._add_partial(reduction):
                    self._last[stream] = stream.record()
                    return
            stream = self._all_reduce_shard(reduction)
        if unit.gradients.all_reduce_hook is not None:
            stream = self._call_all_reduce_hook(reduction, stream)
        drops = stream is not owner and drops_output(unit)
        with stream:
            self._deliver(reduction, stream)
            event = self._last[stream] = stream.record()
        if drops:
            self.lent.lend_output(reduction.output, owner, stream, event)

    def _add_partial(self, reduction: _Reduction) -> bool:
        """Hybrid sharding: add what earlier passes left; false if this pass is kept for a later one as
        well.
        """
        state = reduction.unit.gradients
        if state.partial is not None:
            self._add(reduction, state.partial)
            state.partial = None
        if not state.all_reduce:
            state.partial = PartialSum(reduction.which, reduction.offsets, reduction.output)
            return False
        return True

    def _add(self, reduction: _Reduction, earlier: PartialSum) -> None:
        """Add what an earlier pass left, perhaps of other parameters than this one's."""
        if (tuple(earlier.which), *earlier.offsets) == (tuple(reduction.which), *reduction.offsets):
            reduction.output.add_(earlier.parts)
            return
        unit, layout = reduction.unit, reduction.unit.layout
        both = tuple(sorted({*earlier.which, *reduction.which}))
        plan = self._plan(unit, both)
        places = dict(zip(both, plan.offsets, strict=True))
        total = torch.zeros(
            plan.numel // layout.world_size, dtype=reduction.output.dtype, device=reduction.output.device
        )
        for which, starts, parts in (
            (earlier.which, earlier.offsets, earlier.parts),
            (reduction.which, reduction.offsets, reduction.output),
        ):
            for index, start in zip(which, starts, strict=True):
                size = layout.segments[index].shard_padded_numel
                total[places[index] : places[index] + size].add_(parts[start : start + size])
        reduction.which, reduction.offsets, reduction.output = both, plan.offsets, total

    def _all_reduce_shard(self, reduction: _Reduction) -> Stream:
        unit, streams = reduction.unit, self._streams
        group = unit.groups.replicate
        assert group is not None
        streams.all_reduce.follow(streams.reduce_scatter)
        with span(unit.labels.all_reduce), streams.all_reduce:
            comm.all_reduce(reduction.output, group, reduction.average.operation, async_op=False)
        return streams.all_reduce

    def _call_all_reduce_hook(self, reduction: _Reduction, stream: Stream) -> Stream:
        """Give the user's hook what was reduced: the average, unless it is divided outside of collectives."""
        state = reduction.unit.gradients
        assert state.all_reduce_hook is not None
        hook_stream = state.hook_stream if state.hook_stream is not None else self._streams.all_reduce
        hook_stream.follow(stream)
        with hook_stream:
            if not (state.force_sum or comm.may_overflow(reduction.output.dtype)):
                _divide(reduction)
            state.all_reduce_hook(reduction.output)
        return hook_stream

    def _deliver(self, reduction: _Reduction, stream: Stream) -> None:
        unit, output = reduction.unit, reduction.output
        _divide(reduction)
        delivered = unit.precision.delivered
        gradient = output if output.dtype == delivered else output.to(delivered)
        if unit.offload is None:
            unit.presentation.deliver(gradient, reduction.which, reduction.offsets)
        else:
            self._returns.start(unit, gradient, reduction.which, reduction.offsets, stream)


def _run_hook(reduction: _Reduction, hook: CommHook) -> None:
    """Let the hook reduce; what it leaves is the result."""
    source, layout = reduction.source, reduction.unit.layout
    if reduction.unit.groups.shard is None:
        hook.reduce(source, None, reduction.unit.name)
    else:
        reduction.output = torch.empty(layout.shard_numel, dtype=source.dtype, device=source.device)
        hook.reduce(source, reduction.output, reduction.unit.name)


def _divide(reduction: _Reduction) -> None:
    """What is left of the division, once."""
    if reduction.divisor != 1:
        reduction.output.div_(reduction.divisor)
        reduction.divisor = 1.0
