"""Where each parameter's elements are in a unit's buffers. Pure functions: no communication, no device.

Two layouts, one for each front end, here for two parameters a (3 x 2) and b (4) on two ranks:

``flat_layout`` (FSDP1, in ``fsdp1/flat_param.py``): the parameters one after another, padded at the end, cut
into equal shards. What an all-gather returns *is* the parameters; nothing is copied::

    gathered   a0 a1 a2 a3 a4 | a5 b0 b1 b2 b3        shard of rank 0 | shard of rank 1
    full       the same memory

``chunked_layout`` (FSDP2): each parameter is cut on dim 0 as ``torch.chunk`` cuts it and each chunk is
padded, so that every shard is a slice of rows. What an all-gather returns is ordered by rank first, so one
fused copy is needed to make each parameter contiguous::

    gathered   a(rows 0,1) b(0,1) | a(row 2) pad b(2,3)       rank-major
    full       a(rows 0,1,2) pad  ·  b(0..3)                  parameter-major, each start aligned

A parameter that is cut on another dim is cut evenly and has no padding, but its chunks interleave in the full
parameter: they are copied one parameter at a time, and so come last in a unit (``UnitLayout.fused``).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from operator import attrgetter

import torch

from .torch_internals import chunk_cat, foreach_copy_

# Matrix kernels read 16 bytes at a time; a parameter that starts off this grid takes a slow path on GPUs.
ALIGNMENT_BYTES = 16


@dataclass(frozen=True, slots=True)
class Segment:
    """One parameter's place in the buffers of its unit. All sizes are in elements.

    ``shard_shape`` is the shape of this rank's part without padding: rows for a chunked layout, one dimension
    for a flat one. ``shard_range`` is the part's ``[start, end)`` inside the flattened parameter, where it is
    one piece of that (``dim`` 0).
    """

    shape: tuple[int, ...]
    numel: int
    shard_offset: int
    shard_shape: tuple[int, ...]
    shard_range: tuple[int, int]
    shard_numel: int
    shard_padded_numel: int
    full_offset: int
    full_padded_numel: int
    # The dimension that is cut.
    dim: int = 0

    @property
    def blocks(self) -> tuple[int, int]:
        """Return how one rank's part is in the full parameter: so many pieces of so many elements each."""
        pieces = math.prod(self.shape[: self.dim])
        return pieces, self.shard_padded_numel // max(pieces, 1)

    def in_shard(self, shard: torch.Tensor) -> torch.Tensor:
        """Return where this rank's part is in a 1-D ``shard``: a view, 1-D, without padding."""
        return shard[self.shard_offset : self.shard_offset + self.shard_numel]

    def in_full(self, full: torch.Tensor) -> torch.Tensor:
        """Return where the parameter is in a 1-D ``full`` buffer: a view, in its own shape."""
        return full[self.full_offset : self.full_offset + self.numel].view(self.shape)

    def own_part(self, value: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a whole ``value``, 1-D, where it is one piece (``dim`` 0)."""
        start, end = self.shard_range
        return value.detach().reshape(-1)[start:end]

    @torch.no_grad()
    def store(self, value: torch.Tensor, shard: torch.Tensor) -> None:
        """Copy this rank's part of a whole ``value`` to its place in ``shard``."""
        if self.shard_numel:
            self.in_shard(shard).copy_(self.own_part(value))


@dataclass(frozen=True)
class UnitLayout:
    """The layout of a whole unit for one rank.

    ``rank_major`` tells that the gathered buffer has to be copied into the full one; otherwise both are one
    memory. ``whole`` tells that gradients are always reduced as one piece, with zeros for those that are
    missing; otherwise any subset of the parameters can be reduced by itself.
    """

    world_size: int
    rank: int
    segments: tuple[Segment, ...]
    shard_numel: int
    full_numel: int
    rank_major: bool
    whole: bool
    # How many parameters, the first ones, may have collectives of their own (``gather.py``).
    grouped: int = 0

    @property
    def gathered_numel(self) -> int:
        """Return elements an all-gather returns: every rank's shard with its padding."""
        return self.world_size * self.shard_numel

    def store(self, values: Sequence[torch.Tensor], shard: torch.Tensor) -> None:
        """Copy this rank's part of whole ``values``, one for each parameter, into ``shard``."""
        for segment, value in zip(self.segments, values, strict=True):
            segment.store(value, shard)

    def placed(self, starts: Sequence[int]) -> "UnitLayout":
        """Return the same layout with the parameters at other ``starts`` in the full buffer."""
        pairs = zip(self.segments, starts, strict=True)
        return replace(self, segments=tuple(replace(each, full_offset=start) for each, start in pairs))

    @cached_property
    def parameter_numel(self) -> int:
        """Return elements of the parameters themselves, without any padding."""
        return sum(segment.numel for segment in self.segments)

    @cached_property
    def has_scalars(self) -> bool:
        """Return whether some parameter has no dimensions."""
        return any(not segment.shape for segment in self.segments)

    @cached_property
    def has_empty(self) -> bool:
        """Return whether some parameter has no elements."""
        return any(not segment.numel for segment in self.segments)

    @cached_property
    def fused(self) -> int:
        """Return how many parameters, the first ones, are cut on dim 0: one copy serves all of them."""
        return sum(segment.dim == 0 for segment in self.segments)

    @cached_property
    def interleaved(self) -> bool:
        """Return whether some parameter is cut on another dim than the first."""
        return self.fused < len(self.segments)

    @cached_property
    def split_sizes(self) -> tuple[int, ...]:
        """Return the padded size of each part in one shard, in order, of parameters cut on dim 0."""
        return tuple(segment.shard_padded_numel for segment in self.segments[: self.fused])


def _align(numel: int, element_size: int) -> int:
    step = max(1, ALIGNMENT_BYTES // element_size)
    return -(-numel // step) * step


def chunk_rows(rows: int, world_size: int, rank: int) -> tuple[int, int]:
    """Return the ``[start, end)`` rows that ``torch.chunk`` gives to ``rank``; empty past the last chunk."""
    step = -(-rows // world_size)
    return min(rank * step, rows), min((rank + 1) * step, rows)


def chunked_layout(
    shapes: Sequence[Sequence[int]],
    world_size: int,
    rank: int,
    element_size: int = 4,
    dims: Sequence[int] | None = None,
    grouped: int = 0,
) -> "UnitLayout":
    """Return the fully_shard layout: every parameter chunked on one dim, each chunk padded to the largest.

    Args:
        shapes: shape of each parameter, at least one dimension each (``make_units`` refuses others).
        element_size: bytes of the widest dtype the full buffer is held in, for alignment.
        dims: the dim on which each is cut, by default 0; parameters with another dim, which divides
            (``check_even``), come last (``order_for_groups``).
        grouped: how many, the first ones, may have collectives of their own.
    """
    dims = [0] * len(shapes) if dims is None else dims
    segments: list[Segment] = []
    shard_offset = full_offset = 0
    for shape, dim in zip(shapes, dims, strict=True):
        segment = _chunked_segment(tuple(shape), dim, world_size, rank, shard_offset, full_offset)
        segments.append(segment)
        # One rank: the shard is the parameters, so it is the shard that has to be aligned.
        padded = segment.shard_padded_numel
        shard_offset += _align(padded, element_size) if world_size == 1 else padded
        full_offset += _align(segment.full_padded_numel, element_size)
    return UnitLayout(
        world_size,
        rank,
        tuple(segments),
        shard_offset,
        full_offset,
        rank_major=world_size > 1,
        whole=False,
        grouped=grouped,
    )


def _chunked_segment(
    shape: tuple[int, ...], dim: int, world_size: int, rank: int, shard_offset: int, full_offset: int
) -> Segment:
    numel, row = math.prod(shape), math.prod(shape[1:])
    start, end = chunk_rows(shape[dim], world_size, rank)
    # Room for rows of any number of ranks that divides this one (``smaller_group.py``), whatever dim is cut.
    rows_padded = -(-shape[0] // world_size) * row
    part = (*shape[:dim], end - start, *shape[dim + 1 :])
    return Segment(
        shape=shape,
        numel=numel,
        shard_offset=shard_offset,
        shard_shape=part,
        shard_range=(start * row, end * row) if dim == 0 else (0, 0),
        shard_numel=math.prod(part),
        shard_padded_numel=rows_padded if dim == 0 else numel // world_size,
        full_offset=full_offset,
        full_padded_numel=rows_padded * world_size,
        dim=dim,
    )


# Fused copies between flat buffers and tensors: out of an all-gather's output, which is ordered by rank,
# into a reduce-scatter's input, and the parts of a reduced gradient.
#
# ::
#
#     gathered    a0 b0 | a1 b1 | a2 b2       a row a rank
#     full        a0 a1 a2   b0 b1 b2         each parameter contiguous


def places(layout: "UnitLayout", full: torch.Tensor) -> list[torch.Tensor]:
    """Return where parameters that are cut on dim 0 are in ``full`` (1-D): views of (ranks, padded part)."""
    ranks = layout.world_size
    return [
        full[segment.full_offset : segment.full_offset + segment.shard_padded_numel * ranks].view(ranks, -1)
        for segment in layout.segments[: layout.fused]
    ]


class CopyOut:
    """Fills a unit's full buffer from what was gathered. All views are made once.

    Args:
        layout: of the gather; rank-major.
        full: 1-D, the parameters; its memory may come and go.
        source: what every call copies, where that is one tensor of the CPU: there one copy after the other
            costs less than to split again, and neighbours of one size are one copy.
    """

    def __init__(self, layout: "UnitLayout", full: torch.Tensor, source: torch.Tensor | None = None) -> None:
        self._layout = layout
        self._parts: list[torch.Tensor] = []
        self._fused = places(layout, full)
        if source is not None and not layout.interleaved:
            self._join_neighbours(full, source)
        # Parameters that are cut on another dim than the first.
        self._interleaved = [
            full[s.full_offset : s.full_offset + s.numel].view(s.blocks[0], layout.world_size, s.blocks[1])
            for s in layout.segments[layout.fused :]
        ]

    def _join_neighbours(self, full: torch.Tensor, source: torch.Tensor) -> None:
        """View each run of parameters of one size as (ranks, parameters, part), at both ends of its copy."""
        ranks, row = self._layout.world_size, self._layout.shard_numel
        self._fused = []
        for numel, run in groupby(self._layout.segments, attrgetter("shard_padded_numel")):
            first, *others = run
            shape = (ranks, 1 + len(others), numel)
            step = others[0].full_offset - first.full_offset if others else numel
            self._fused.append(full.as_strided(shape, (numel, step, 1), first.full_offset))
            self._parts.append(source.as_strided(shape, (row, numel, 1), first.shard_offset))

    def __call__(self, gathered: torch.Tensor) -> None:
        """Copy ``gathered`` (1-D: ranks x shard, of the full buffer's dtype) out, on the current stream."""
        if self._parts:
            foreach_copy_(self._fused, self._parts)
            return
        layout = self._layout
        rows = gathered.view(layout.world_size, -1)
        if self._interleaved:
            rows = self._copy_interleaved(rows)
        if self._fused:
            torch.split_with_sizes_copy(rows, layout.split_sizes, dim=1, out=self._fused)

    def _copy_interleaved(self, rows: torch.Tensor) -> torch.Tensor:
        layout = self._layout
        parts = [
            rows[:, s.shard_offset : s.shard_offset + s.shard_padded_numel].view(layout.world_size, *s.blocks)
            for s in layout.segments[layout.fused :]
        ]
        foreach_copy_([whole.transpose(0, 1) for whole in self._interleaved], parts)
        return rows[:, : sum(layout.split_sizes)]


def copy_in(gradients: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Copy ``gradients``, cut on dim 0, into ``out`` of (ranks, elements of a rank), and cast to its dtype.

    None of them may be empty.
    """
    rows = out.shape[0]
    if out.device.type == "cpu" and gradients[0].dtype != out.dtype:
        out.copy_(chunk_cat(gradients, 0, rows))  # a cast on the way is slow there: it goes row by row
    else:
        chunk_cat(gradients, 0, rows, out=out)


class Cuts:
    """Where parts are in a 1-D buffer, and what shape each has: in any order, with gaps.

    Args:
        numel: elements of the buffer.
        starts: where each part starts.
        shapes: of the parts, which do not overlap.
    """

    def __init__(self, numel: int, starts: Sequence[int], shapes: Sequence[tuple[int, ...]]) -> None:
        numels = [torch.Size(shape).numel() for shape in shapes]
        self._sizes: list[int] = []
        self._which = [0] * len(starts)
        end = 0
        for index in sorted(range(len(starts)), key=lambda index: (starts[index], numels[index])):
            if starts[index] > end:
                self._sizes.append(starts[index] - end)
            self._which[index] = len(self._sizes)
            self._sizes.append(numels[index])
            end = max(end, starts[index] + numels[index])
        if numel > end:
            self._sizes.append(numel - end)
        self._as_split = self._which == list(range(len(self._sizes)))
        self._shaped = [(index, shape) for index, shape in enumerate(shapes) if len(shape) != 1]

    def __call__(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Return the parts in their order: memory of ``buffer``, but to autograd no views of it."""
        pieces = buffer.unsafe_split_with_sizes(self._sizes)
        parts = list(pieces) if self._as_split else [pieces[index] for index in self._which]
        for index, shape in self._shaped:
            parts[index] = parts[index].view(shape)
        return parts
