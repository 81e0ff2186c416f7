"""From the gradients of one unit's backward to sharded gradients.

::

    compute      [backward of unit 2]       [backward of unit 1]
    reduce                           [copy in][reduce-scatter] ............ (cast, deliver)
    all_reduce                                                [all-reduce] (cast, deliver)

The copy-in is one fused operation. It copies all gradients into the collective's input, rank-major if the
layout is chunked, and casts them to the reduce dtype. It runs on the reduce stream and overlaps with the next
unit's backward; the gradients are kept until it is done. The output of the collective *is* the memory of the
sharded gradients, unless they are delivered in another dtype.

On the CPU a collective runs on the backend's threads. The steps after it (sum, division, delivery) run when a
later unit is reduced or backward ends, in the order of issue.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from operator import is_not

import torch

from ..collectives import comm
from ..shared.settings import MemoryHandover
from . import reduce_ways
from .context import span
from .gradient_state import GRAD, NONE, OPTIMIZERS, PartialSum
from .lent import GradientReturns, LentMemory
from .streams import Event, Stream, Streams
from .unit import Unit

# On the CPU: maximum number of collectives in flight, one running and one queued.
_MOST_IN_FLIGHT = 2

GradientHook = Callable[[torch.Tensor], torch.Tensor | None]


class Reducer:
    """Reduces the gradients of a tree of units."""

    def __init__(self, streams: Streams, mode: MemoryHandover) -> None:
        self._streams = streams
        # Without streams: reductions that are not completed.
        self.in_flight: deque[reduce_ways.Reduction] = deque()
        self._returns = GradientReturns(streams, mode)
        self.lent = LentMemory(streams, mode)
        self._last: dict[Stream, Event | None] = {}
        self._plans: dict[tuple[Unit, tuple[int, ...]], reduce_ways.Plan] = {}

    # -- entry points ----------------------------------------------------------------------------------------

    def begin_stage(self, units: Sequence[Unit]) -> None:
        """Take back memory that earlier stages lent, before the ``units`` of one stage are reduced."""
        self.lent.take_back(max(unit.gradients.held for unit in units) - 1)

    def reduce(self, unit: Unit, which: tuple[int, ...], gradients: list[torch.Tensor]) -> None:
        """Reduce ``gradients`` of the parameters ``which`` and deliver the result to the unit's presentation.

        Empties the list, so that nothing keeps gradients longer than until their copy-in.
        """
        state = unit.gradients
        local = unit.groups.ranks == 1 and unit.offload is None
        if local and state.comm_hook is None and state.all_reduce_hook is None:
            _deliver_local(unit, which, gradients)
            return
        streams, lent = self._streams, self.lent
        stream = streams.reduce_scatter if unit.gathers else streams.all_reduce
        with span(unit.labels.reduce_scatter if unit.gathers else unit.labels.all_reduce):
            average, plan = self._averaging(unit), self._plan(unit, which)
            source = self._input(unit, average, plan) if lent.lends_inputs else None
            # The compute stream has produced the gradients and is done with the memory of ``source``.
            if streams.has_streams:
                stream.follow(streams.compute)
            with stream:
                reduction = reduce_ways.choose_reduction(
                    reduce_ways.Given(unit, which, gradients, average, plan), source, streams
                )
                if not reduction.reads_gradients:  # Invariant: these are lent only until the copy-in
                    lent.lend_gradients(gradients, stream, copied=True)
                reduction.start(streams)
                if gradients:  # the collectives read them
                    lent.lend_gradients(gradients, stream)
                if source is not None:
                    lent.lend_input(source, stream)
        if streams.has_streams or (unit.gathers and unit.groups.replicate is not None):
            # With replicas a second collective follows. All ranks must issue both in the same order.
            self._complete(reduction)
        else:
            self.in_flight.append(reduction)
            while len(self.in_flight) > _MOST_IN_FLIGHT:
                self._complete(self.in_flight.popleft())

    def reduce_partial(self, unit: Unit) -> None:
        """All-reduce the partial sum of earlier passes, after a pass without gradients (hybrid sharding)."""
        partial, unit.gradients.partial = unit.gradients.partial, None
        assert partial is not None
        average = self._averaging(unit)
        self._complete(reduce_ways.Reduction(unit, partial.which, partial.offsets, partial.parts, average))

    def finish(self) -> None:
        """Deliver all gradients and make the compute stream wait for them, at the end of backward."""
        while self.in_flight:
            self._complete(self.in_flight.popleft())
        # The optimizer runs next and reads gradients that were delivered on each of these streams.
        for event in self._last.values():
            self._streams.compute.wait(event)
        self._last.clear()
        self._returns.finish()
        self.lent.finish()

    def discard(self) -> None:
        """Wait for reductions in flight and deliver nothing, because the iteration failed."""
        for reduction in self.in_flight:
            if reduction.work is not None:
                reduction.work.wait()
        self.in_flight.clear()
        self._returns.finish(deliver=False)
        self.finish()

    # -- the steps of one reduction --------------------------------------------------------------------------

    def _input(self, unit: Unit, average: comm.Averaging, plan: reduce_ways.Plan) -> torch.Tensor | None:
        """Allocate the collective's input on the compute stream, mostly from activations that backward freed.

        Return ``None`` if the reduce stream allocates the input, or if the collective reads the gradients.
        """
        if not unit.gathers or unit.gradients.replaced:
            return None  # without sharding, the input becomes the gradient
        if reduce_ways.groups_gradients(unit, average) or reduce_ways.in_pieces(
            unit, average, plan, self._streams
        ):
            return None
        return torch.empty(plan.numel, dtype=unit.precision.reduce, device=unit.device)

    def _averaging(self, unit: Unit) -> comm.Averaging:
        groups, state = unit.groups, unit.gradients
        if state.comm_hook is not None:
            return comm.Averaging(None, 1.0, 1.0)
        group = groups.reduce or groups.replicate
        native = self._streams.has_streams or (group is not None and comm.averages(group, unit.device))
        return comm.averaging(
            groups.ranks,
            unit.precision.reduce,
            native_average=native,
            factor=state.divide_factor,
            force_sum=state.force_sum or (groups.replicate is not None and state.divide_factor is not None),
        )

    def _plan(self, unit: Unit, which: tuple[int, ...]) -> reduce_ways.Plan:
        key = (unit, which)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = reduce_ways.plan_of(unit, which)
        return plan

    def _complete(self, reduction: reduce_ways.Reduction) -> None:
        unit, streams = reduction.unit, self._streams
        owner = stream = streams.reduce_scatter if unit.groups.shard is not None else streams.all_reduce
        if reduction.work is not None:
            with stream:
                reduction.work.wait()
            reduction.work = None
        reduction.finish()
        if unit.groups.shard is not None and unit.groups.replicate is not None:
            with stream:
                if not self._add_partial(reduction):
                    self._last[stream] = stream.record()
                    return
            stream = self._all_reduce_shard(reduction)
        if unit.gradients.all_reduce_hook is not None:
            stream = self._call_all_reduce_hook(reduction, stream)
        drops = stream is not owner and _drops_output(unit)
        with stream:
            self._deliver(reduction, stream)
            event = self._last[stream] = stream.record()
        if drops:  # otherwise its memory becomes the gradient
            self.lent.lend_output(reduction.output, owner, stream, event)

    def _add_partial(self, reduction: reduce_ways.Reduction) -> bool:
        """Add the partial sum of earlier passes (hybrid sharding); return False if the sum stays partial."""
        state = reduction.unit.gradients
        if state.partial is not None:
            self._add(reduction, state.partial)
            state.partial = None
        if not state.all_reduce:
            state.partial = PartialSum(reduction.which, reduction.offsets, reduction.output)
            return False
        return True

    def _add(self, reduction: reduce_ways.Reduction, earlier: PartialSum) -> None:
        """Add the partial sum of an earlier pass, which may have other parameters than this one."""
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
        for each in (earlier, PartialSum(reduction.which, reduction.offsets, reduction.output)):
            for index, start in zip(each.which, each.offsets, strict=True):
                size = layout.segments[index].shard_padded_numel
                total[places[index] : places[index] + size].add_(each.parts[start : start + size])
        reduction.which, reduction.offsets, reduction.output = both, plan.offsets, total

    def _all_reduce_shard(self, reduction: reduce_ways.Reduction) -> Stream:
        unit, streams = reduction.unit, self._streams
        group = unit.groups.replicate
        assert group is not None
        # Each rank all-reduces only its own shard over the replicas: 1 / shard_size of the gradients.
        streams.all_reduce.follow(streams.reduce_scatter)
        with span(unit.labels.all_reduce), streams.all_reduce:
            comm.all_reduce(reduction.output, group, reduction.average.operation, async_op=False)
        return streams.all_reduce

    def _call_all_reduce_hook(self, reduction: reduce_ways.Reduction, stream: Stream) -> Stream:
        """Call the user's hook with the average, or with a partly divided sum (``force_sum``, fp16)."""
        state = reduction.unit.gradients
        assert state.all_reduce_hook is not None
        hook_stream = state.hook_stream if state.hook_stream is not None else self._streams.all_reduce
        hook_stream.follow(stream)
        with hook_stream:
            # The hook gets the average on every backend, also on gloo, which can only sum.
            if not (state.force_sum or comm.may_overflow(reduction.output.dtype)):
                _divide(reduction)
            state.all_reduce_hook(reduction.output)
        return hook_stream

    def _deliver(self, reduction: reduce_ways.Reduction, stream: Stream) -> None:
        unit, output = reduction.unit, reduction.output
        _divide(reduction)
        delivered = unit.precision.delivered
        gradient = output if output.dtype == delivered else output.to(delivered)
        if unit.offload is None:
            unit.presentation.deliver(gradient, reduction.which, reduction.offsets)
        else:
            self._returns.start(unit, gradient, reduction.which, reduction.offsets, stream)


def _divide(reduction: reduce_ways.Reduction) -> None:
    """Divide by the remaining divisor, once."""
    if reduction.divisor != 1:
        reduction.output.div_(reduction.divisor)
        reduction.divisor = 1.0


def _drops_output(unit: Unit) -> bool:
    """Return whether delivery frees the reduced gradient's memory because the gradient is cast, added to an
    earlier gradient, or consumed by a hook. Otherwise the memory becomes ``grad``."""
    if unit.precision.delivered != unit.precision.reduce:
        return True
    return any(
        each.grad is not None or each._post_accumulate_grad_hooks or OPTIMIZERS in each.__dict__
        for each in unit.presentation.trained()
    )


def _deliver_local(unit: Unit, which: tuple[int, ...], gradients: list[torch.Tensor]) -> None:
    """Deliver the gradients of a single rank without a collective, cast and scaled if set."""
    precision, factor = unit.precision, unit.gradients.divide_factor
    gradients = [g if type(g) is torch.Tensor else reduce_ways.plain(g) for g in gradients]
    if precision.reduce != precision.compute:
        gradients = [g.to(precision.reduce) for g in gradients]
    if factor is not None and factor != 1:
        gradients = [g / factor for g in gradients]
    if precision.delivered != precision.reduce:
        gradients = [g.to(precision.delivered) for g in gradients]
    unit.presentation.deliver_local(gradients, which)


# -- gradients of the unsharded parameters: taken for reduction, or kept for a later pass --------------------


def take_gradients(unit: Unit) -> tuple[tuple[int, ...], list[torch.Tensor]]:
    """Take the unsharded gradients from a unit. Return the indices of their parameters, and the gradients."""
    keeps, unused_as_zero = unit.gradients.accumulated, unit.gradients.unused_as_zero
    accumulating = bool(keeps)
    which: list[int] = []
    gradients: list[torch.Tensor] = list(map(GRAD, unit.unsharded))
    if not accumulating and all(map(is_not, gradients, NONE)):  # fast path: no Python loop over parameters
        any(map(setattr, unit.unsharded, repeat("grad"), NONE))  # Invariant: each is reduced once
        every = tuple(range(len(gradients)))
        return every, gradients if unit.plain else _local_gradients(unit, every, gradients)
    gradients.clear()
    for index, parameter in enumerate(unit.unsharded):
        gradient, parameter.grad = parameter.grad, None
        if accumulating:
            kept = keeps.pop(index, None)
            if kept is not None:
                gradient = kept if gradient is None else kept.add_(gradient)
            elif gradient is not None:
                gradient = gradient.to(unit.precision.reduce)
        if gradient is None and unused_as_zero and parameter.requires_grad:
            dtype = unit.precision.reduce if accumulating else unit.precision.compute
            gradient = torch.zeros_like(parameter, dtype=dtype)
        if gradient is not None:
            which.append(index)
            gradients.append(gradient)
    if not unit.plain:
        gradients = _local_gradients(unit, which, gradients)
    return tuple(which), gradients


def call_hooks(
    unit: Unit, hooks: Iterable[GradientHook], which: Sequence[int], gradients: Sequence[torch.Tensor]
) -> tuple[tuple[int, ...], list[torch.Tensor]]:
    """Run gradient ``hooks`` of the flat parameter and return the indices and gradients to reduce."""
    segments = unit.layout.segments
    flat = torch.cat([each.reshape(-1) for each in reduce_ways.fill_missing(unit.layout, which, gradients)])
    for hook in hooks:
        changed = hook(flat)
        flat = flat if changed is None else changed
    return tuple(range(len(segments))), [segment.in_full(flat) for segment in segments]


def keep_gradients(unit: Unit) -> None:
    """Accumulate without reducing, in the reduce dtype if that differs from the dtype of autograd.

    If the presentation shows unreduced gradients, they stay as autograd left them.
    """
    if unit.precision.reduce == unit.precision.compute or unit.presentation.unreduced is not None:
        return
    accumulated = unit.gradients.accumulated
    for index, parameter in enumerate(unit.unsharded):
        if parameter.grad is None:
            continue
        if index in accumulated:
            accumulated[index].add_(parameter.grad)
        else:
            accumulated[index] = parameter.grad.to(unit.precision.reduce)
        parameter.grad = None


def _local_gradients(unit: Unit, which: Sequence[int], gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the local tensors to reduce for the parameters ``which``, if not all are plain tensors."""
    wholes = [unit.parameters[index].whole for index in which]
    gradients = [
        gradient if whole is None else whole.local_gradient(gradient)
        for whole, gradient in zip(wholes, gradients, strict=True)
    ]
    if unit.gather.makes_views or (unit.groups.ranks > 1 and len({each.dtype for each in gradients}) < 2):
        return gradients  # the copy-in casts them
    return [gradient.to(unit.precision.reduce) for gradient in gradients]
