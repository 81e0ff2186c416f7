"""The kinds of gradient reductions, one class each; ``choose_reduction`` selects one.

=============  ======================================  =====================================================
class          used for                                input of the collective
=============  ======================================  =====================================================
``Packed``     every unit                              one input that all gradients are copied into
``Grouped``    large parameters, in place              the gradients from autograd; small ones packed
``Pieces``     a unit of gigabytes with a cast to the  one piece of the gradients after the other, cast into
               reduce dtype                            one buffer
``Exchanged``  gloo                                    the parts that other ranks own
=============  ======================================  =====================================================
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..collectives import comm
from ..shared.layout import Segment, UnitLayout, chunk_rows, copy_in
from ..shared.settings import UnitPrecision
from ..shared.torch_internals import chunk_cat, foreach_add_
from .streams import Streams
from .unit import Unit


def plain(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient of a subclass as a plain tensor.

    A subclass may run an in-place operation on a plain tensor and itself once for each tensor that it wraps.
    ``copy_`` gives the same result however often it runs.
    """
    return torch.empty(gradient.shape, dtype=gradient.dtype, device=gradient.device).copy_(gradient)


# Minimum size of a piece. It takes 5 ms or more between nodes; launching a collective takes up to 3 ms.
PIECE_BYTES = 1 << 30


# -- the plan of a reduction ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """The plan for reducing the gradients of one set of a unit's parameters.

    Attributes:
        offsets: start of each parameter's part in the reduced shard.
        numel: elements of the input, of which ``used`` are gradients.
        pieces: ranges of positions that may be reduced as one piece; empty to reduce all together.
        prepares: whether gradients need ``prepare``.
    """

    offsets: list[int]
    numel: int
    used: int
    pieces: Sequence[range]
    prepares: bool


def plan_of(unit: Unit, which: Sequence[int]) -> Plan:
    """Return the plan for gradients of the parameters ``which``."""
    layout = unit.layout
    segments = [layout.segments[i] for i in which]
    missing = layout.whole and len(which) < len(layout.segments)
    prepares = missing or layout.interleaved or layout.has_scalars
    if layout.whole:
        offsets = [segment.shard_offset for segment in segments]
        return Plan(offsets, layout.gathered_numel, layout.parameter_numel, (), prepares)
    sizes = [segment.shard_padded_numel for segment in segments]
    offsets = [sum(sizes[:i]) for i in range(len(sizes))]
    numel = sum(sizes) * layout.world_size
    pieces = _pieces_of(layout, unit.precision, which) if unit.gathers else ()
    return Plan(offsets, numel, numel, pieces, prepares)


def _pieces_of(layout: UnitLayout, precision: UnitPrecision, which: Sequence[int]) -> Sequence[range]:
    """Divide the gradients of the parameters ``which`` into pieces, in order. Return none if there is only
    one piece, without a cast (no memory to save), or if some parameters need a separate copy (not sharded on
    dim 0, or without elements, which ``chunk_cat`` rejects).
    """
    casts = precision.reduce != precision.compute
    if not layout.rank_major or layout.interleaved or layout.has_empty or not casts:
        return ()
    pieces, start, nbytes = [], 0, 0
    for position, index in enumerate(which):
        numel = layout.segments[index].shard_padded_numel * layout.world_size
        nbytes += numel * precision.reduce.itemsize
        if nbytes >= PIECE_BYTES:
            pieces.append(range(start, position + 1))
            start, nbytes = position + 1, 0
    if pieces:
        pieces[-1] = range(pieces[-1].start, len(which))  # the remainder is smaller than a piece
    return pieces if len(pieces) > 1 else ()


def fill_missing(
    layout: UnitLayout, which: Sequence[int], gradients: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return gradients for all parameters of the unit, with zeros for missing ones."""
    given = dict(zip(which, gradients, strict=True))
    like = gradients[0]
    return [
        given[i] if i in given else torch.zeros(segment.shape, dtype=like.dtype, device=like.device)
        for i, segment in enumerate(layout.segments)
    ]


def prepare(layout: UnitLayout, which: Sequence[int], gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """Prepare gradients for the copy-in: add zeros for missing ones, make the chunks of parameters that are
    sharded on a dim other than 0 contiguous by rank, and view scalars as 1-D."""
    if layout.whole and len(which) < len(layout.segments):
        gradients = fill_missing(layout, which, gradients)
    if layout.interleaved and layout.rank_major:
        dims = [layout.segments[index].dim for index in which]
        gradients = [
            torch.cat(gradient.chunk(layout.world_size, dim)) if dim else gradient
            for gradient, dim in zip(gradients, dims, strict=True)
        ]
    if layout.has_scalars:
        gradients = [gradient.view(-1) for gradient in gradients]
    return gradients


# -- the kinds of reductions ---------------------------------------------------------------------------------


class Given(NamedTuple):
    """The input of a reduction: ``gradients`` of a unit's parameters ``which``, and how to reduce them."""

    unit: Unit
    which: Sequence[int]
    gradients: list[torch.Tensor]
    average: comm.Averaging
    plan: Plan


class Reduction:
    """One unit's reduction in flight and the steps that remain. This base class has no collective.

    Args:
        which: indices of the parameters.
        offsets: start of each parameter's part in ``output``.
        output: 1-D, in the reduce dtype; this rank's shard once the collective is done.
    """

    # Whether the collectives read the gradients; otherwise only the copy-in does.
    reads_gradients = False

    def __init__(
        self,
        unit: Unit,
        which: Sequence[int],
        offsets: Sequence[int],
        output: torch.Tensor,
        average: comm.Averaging,
    ) -> None:
        self.unit = unit
        self.which = which
        self.offsets = offsets
        self.output = output
        self.average = average
        # The remaining divisor.
        self.divisor = average.after
        self.work: Any = None

    def start(self, streams: Streams) -> None:
        """Issue the collectives on the current stream; on the CPU, set ``work`` for the caller to wait on."""

    def finish(self) -> None:
        """Set the result after the collectives are done, and drop their inputs."""


class Packed(Reduction):
    """One collective over all gradients. One fused copy casts them into ``source``.

    Args:
        source: memory for the collective's input; allocated here if ``None``.
    """

    def __init__(self, given: Given, source: torch.Tensor | None) -> None:
        unit, gradients, plan, before = given.unit, given.gradients, given.plan, given.average.before
        layout, state = unit.layout, unit.gradients
        if source is None:
            compresses = state.comm_hook is not None and state.comm_hook.compresses
            dtype = unit.precision.compute if compresses else unit.precision.reduce
            source = comm.allocate(plan.numel, dtype, unit.device, state.reduce_scatter)
        if plan.used < plan.numel:
            source[plan.used :].zero_()
        used = source if layout.rank_major else source[: plan.used]
        if layout.has_empty:  # copy_in refuses them
            gradients = [gradient for gradient in gradients if gradient.numel()]
        if gradients:
            copy_in(gradients, used.view(layout.world_size if layout.rank_major else 1, -1))
        if before != 1:
            source.div_(before)  # the rest of the divisor is applied after the sum (``comm.averaging``)
        super().__init__(unit, given.which, plan.offsets, source, given.average)
        self.source = source

    def start(self, streams: Streams) -> None:
        unit, source, operation = self.unit, self.source, self.average.operation
        groups, state = unit.groups, unit.gradients
        if state.comm_hook is not None:
            sharded = groups.shard is not None
            if sharded:
                self.output = torch.empty(unit.layout.shard_numel, dtype=source.dtype, device=source.device)
            state.comm_hook.reduce(source, self.output if sharded else None, unit.name)
        elif groups.reduce is not None:
            custom, numel = state.reduce_scatter, source.numel() // groups.shard_size
            self.output = comm.allocate(numel, source.dtype, source.device, custom)
            async_op = not streams.has_streams and custom is None
            self.work = comm.reduce_scatter(self.output, source, groups.reduce, operation, async_op, custom)
        elif groups.replicate is not None:
            self.work = comm.all_reduce(source, groups.replicate, operation, not streams.has_streams)


class Grouped(Reduction):
    """Reduce-scatters that read the gradients of autograd in place, issued as one call.

    A large parameter's gradient is contiguous, and its rows are the parts of all ranks in order. So a
    reduce-scatter can read it without a copy-in. The rest of the unit shares a packed reduce-scatter. All
    results are in one buffer, which becomes the sharded gradients::

        gradients   a        b        c  d  --copy--> c0 d0 | c1 d1
                    |        |                         |
        result      a1       b1                       c1 d1       on rank 1
    """

    reads_gradients = True

    def __init__(self, given: Given) -> None:
        unit, which, gradients = given.unit, given.which, given.gradients
        layout, dtype = unit.layout, unit.precision.reduce
        sizes = [layout.segments[index].shard_padded_numel for index in which]
        large = [
            position
            for position, (index, gradient) in enumerate(zip(which, gradients, strict=True))
            if index < layout.grouped and _in_place(layout.segments[index], gradient, unit)
        ]
        packed = [position for position in range(len(which)) if position not in large]
        output = torch.empty(sum(sizes), dtype=dtype, device=unit.device)
        offsets = [0] * len(which)
        self._inputs: list[torch.Tensor] = []
        self._outputs: list[torch.Tensor] = []
        start = 0
        for position in (*large, *packed):
            offsets[position] = start
            if position in large:
                self._inputs.append(gradients[position].view(-1))
                self._outputs.append(output[start : start + sizes[position]])
            start += sizes[position]
        if packed:
            numel = sum(sizes[position] for position in packed)
            source = torch.empty(layout.world_size, numel, dtype=dtype, device=unit.device)
            pieces = [gradients[position] for position in packed if gradients[position].numel()]
            if pieces:  # chunk_cat rejects an empty list
                chunk_cat(pieces, 0, layout.world_size, out=source)
            self._inputs.append(source.view(-1))
            self._outputs.append(output[start - numel :])
        super().__init__(unit, which, offsets, output, given.average)

    def start(self, streams: Streams) -> None:
        group = self.unit.groups.reduce
        assert group is not None
        self.work = comm.reduce_scatter_grouped(
            self._outputs, self._inputs, group, self.average.operation, not streams.has_streams
        )

    def finish(self) -> None:
        self._inputs = []


def _in_place(segment: Segment, gradient: torch.Tensor, unit: Unit) -> bool:
    """Return whether a collective can read the gradient in place: no padding, no cast, contiguous."""
    fills = segment.numel == segment.shard_padded_numel * unit.layout.world_size
    plain = type(gradient) is torch.Tensor and gradient.dtype == unit.precision.reduce
    return fills and plain and gradient.is_contiguous()


class Pieces(Reduction):
    """Reduce-scatters of a large unit, one piece after the other through one buffer of the reduce stream.

    Casting all gradients of a unit together to the reduce dtype would take twice their memory (bf16 to fp32).
    Here a piece is cast on the same stream after the previous collective, so the buffer can be reused without
    a wait::

        reduce   [cast a][reduce-scatter a][cast b][reduce-scatter b] ...      one buffer
        result    a1 | b1 | c1 d1                                              on rank 1
    """

    reads_gradients = True

    def __init__(self, given: Given) -> None:
        unit, plan = given.unit, given.plan
        self._gradients: Sequence[torch.Tensor] = given.gradients
        self._pieces = plan.pieces
        self._sizes = [unit.layout.segments[index].shard_padded_numel for index in given.which]
        output = torch.empty(sum(self._sizes), dtype=unit.precision.reduce, device=unit.device)
        super().__init__(unit, given.which, plan.offsets, output, given.average)

    def start(self, streams: Streams) -> None:
        group, ranks = self.unit.groups.reduce, self.unit.layout.world_size
        assert group is not None
        sizes = [sum(self._sizes[position] for position in piece) for piece in self._pieces]
        buffer = self.output.new_empty(max(sizes) * ranks)
        for piece, size, output in zip(self._pieces, sizes, self.output.split(sizes), strict=True):
            # One buffer for all pieces: stream order puts the next cast after this collective's read.
            source = buffer[: size * ranks]
            gradients = list(self._gradients[piece.start : piece.stop])
            chunk_cat(gradients, 0, ranks, out=source.view(ranks, -1))
            comm.reduce_scatter(output, source, group, self.average.operation, async_op=False)

    def finish(self) -> None:
        self._gradients = ()


class Exchanged(Reduction):
    """A reduce-scatter on gloo, as an all-to-all of the parts that other ranks own and a local sum.

    gloo's reduce-scatter all-reduces the whole tensor and keeps a part. The all-to-all and local sum send
    half as much, and do not copy this rank's own part. On rank 1 of 3, with parameters a and b::

        gradients     a0 a1 a2   b0 b1 b2          a1: the part of a that rank 1 owns
        sent          a0 b0 | a2 b2                to rank 0 | to rank 2
        received      a1 b1 | a1 b1                from rank 0 | from rank 2
        result        their sum, plus a1 b1 of this rank's own gradients, added in place

    Sums run in rank order with the owner last, so the result is the same on every run. The gradients are kept
    until ``finish``, which reads this rank's part of them.
    """

    def __init__(self, given: Given) -> None:
        unit, plan, before = given.unit, given.plan, given.average.before
        self._layout, dtype = unit.layout, unit.precision.reduce
        self._numel = plan.numel // self._layout.world_size
        sent = torch.empty((self._layout.world_size - 1) * self._numel, dtype=dtype, device=unit.device)
        super().__init__(unit, given.which, plan.offsets, sent, given.average)
        gradients = [g if type(g) is torch.Tensor else plain(g) for g in given.gradients]
        cut = self._cut_rows if self._layout.rank_major else self._cut_flat
        # (offset in the result, this rank's part) for each gradient.
        self._own = [(offset, part.to(dtype)) for offset, part in cut(gradients)]
        if before != 1:
            sent.div_(before)
            self._own = [(offset, part / before) for offset, part in self._own]

    def start(self, streams: Streams) -> None:
        group = self.unit.groups.reduce
        assert group is not None
        sent, self.output = self.output, torch.empty_like(self.output)
        self.work = comm.exchange_shards(self.output, sent, group)

    def finish(self) -> None:
        others = self.output.view(self._layout.world_size - 1, self._numel)
        self.output = result = others[0] if len(others) == 1 else others.sum(0)
        parts = [result[offset : offset + part.numel()].view(part.shape) for offset, part in self._own]
        if parts:  # a rank past the last chunk owns nothing
            foreach_add_(parts, [part for _, part in self._own])
        self._own = []

    def _cut_rows(self, gradients: Sequence[torch.Tensor]) -> list[tuple[int, torch.Tensor]]:
        """Copy other ranks' parts of chunked ``gradients`` into the send buffer; return this rank's parts."""
        ranks, rank = self._layout.world_size, self._layout.rank
        own: list[tuple[int, torch.Tensor]] = []
        before: list[torch.Tensor] = []
        after: list[torch.Tensor] = []
        for gradient, offset in zip(gradients, self.offsets, strict=True):
            start, end = chunk_rows(gradient.size(0), ranks, rank)
            if gradient[start:end].numel():
                own.append((offset, gradient[start:end]))
            rows = -(-gradient.size(0) // ranks)
            if gradient.size(0) < rows * ranks:  # each rank's part is padded to the largest
                pad = gradient.new_zeros(rows * ranks - gradient.size(0), *gradient.shape[1:])
                gradient = torch.cat((gradient, pad))
            before.append(gradient[: rank * rows])
            after.append(gradient[(rank + 1) * rows :])
        # The send buffer skips this rank, so the parts of later ranks start one place earlier.
        split = rank * self._numel
        for parts, sent in ((before, self.output[:split]), (after, self.output[split:])):
            if sent.numel():
                parts = [part for part in parts if part.numel()] if self._layout.has_empty else parts
                copy_in(parts, sent.view(-1, self._numel))
        return own

    def _cut_flat(self, gradients: Sequence[torch.Tensor]) -> list[tuple[int, torch.Tensor]]:
        """Do the same as ``_cut_rows`` for gradients of all parameters of a flat layout."""
        own: list[tuple[int, torch.Tensor]] = []
        before: list[torch.Tensor] = []
        after: list[torch.Tensor] = []
        for segment, gradient in zip(self._layout.segments, gradients, strict=True):
            start, end = segment.shard_range
            flat = gradient.reshape(-1)
            before.append(flat[:start])
            after.append(flat[end:])
            if end > start:
                own.append((segment.shard_offset, flat[start:end]))
        parts = before + after
        used = sum(part.numel() for part in parts)
        torch.cat(parts, out=self.output[:used])
        self.output[used:].zero_()
        return own


# -- the choice ----------------------------------------------------------------------------------------------


def groups_gradients(unit: Unit, average: comm.Averaging) -> bool:
    """Return whether collectives may read gradients in place: no cast, division or custom reduction."""
    same = unit.precision.reduce == unit.precision.compute
    own = bool(unit.layout.grouped) and not unit.gradients.replaced and unit.gathers
    return own and same and average.before == 1


def in_pieces(unit: Unit, average: comm.Averaging, plan: Plan, streams: Streams) -> bool:
    """Return whether a large unit is reduced piece by piece."""
    usual = streams.has_streams and average.before == 1 and not unit.gradients.replaced
    return usual and bool(plan.pieces)


def choose_reduction(given: Given, source: torch.Tensor | None, streams: Streams) -> Reduction:
    """Choose the reduction and copy in its gradients on the current stream. Issue no collective.

    Args:
        source: memory of the compute stream for the input, if the collective may read it.
    """
    unit, average, group = given.unit, given.average, given.unit.groups.reduce
    if unit.layout.grouped and groups_gradients(unit, average):
        return Grouped(given)
    if given.plan.pieces and in_pieces(unit, average, given.plan, streams):
        return Pieces(given)
    if given.plan.prepares:
        given = given._replace(gradients=prepare(unit.layout, given.which, given.gradients))
    if group is None or streams.has_streams or unit.gradients.replaced:
        return Packed(given, source)
    return Exchanged(given) if comm.served_by_gloo(group, unit.device) else Packed(given, source)
