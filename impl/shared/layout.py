"""The layout of parameters in a unit's buffers. Pure functions: no communication, no device.

There are two layouts, one for each front end, shown here for parameters a (3 x 2) and b (4) on two ranks:

``flat_layout`` (FSDP1, in ``fsdp1/flat_param.py``): the parameters one after another, padded at the end and
split into equal shards. The all-gather output *is* the parameters, so there is no copy::

    gathered   a0 a1 a2 a3 a4 | a5 b0 b1 b2 b3        shard of rank 0 | shard of rank 1
    full       the same memory

``chunked_layout`` (FSDP2): each parameter is chunked on dim 0 as by ``torch.chunk`` and each chunk is
padded, so that every shard is a slice of rows. The all-gather output is rank-major, so one fused copy is
needed to make each parameter contiguous::

    gathered   a(rows 0,1) b(0,1) | a(row 2) pad b(2,3)       rank-major
    full       a(rows 0,1,2) pad  ·  b(0..3)                  parameter-major, each start aligned

A parameter sharded on another dim must divide evenly and has no padding, but its chunks interleave in the
full parameter. These parameters are copied separately and come last in a unit (``UnitLayout.fused``).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from operator import attrgetter

import torch

from .torch_internals import chunk_cat, foreach_copy_

# Matrix kernels load 16 bytes at a time; on GPUs a parameter without this alignment takes a slow path.
ALIGNMENT_BYTES = 16


@dataclass(frozen=True, slots=True)
class Segment:
    """One parameter's place in the buffers of its unit. All sizes are in elements.

    ``shard_shape`` is the shape of this rank's part without padding: rows in a chunked layout, 1-D in a flat
    one. ``shard_range`` is the part's ``[start, end)`` in the flattened parameter; it is valid only for
    ``dim`` 0, where the part is contiguous.
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
    # The dimension that is sharded.
    dim: int = 0

    @property
    def blocks(self) -> tuple[int, int]:
        """Return (number, size in elements) of the contiguous pieces of one rank's part in the parameter."""
        pieces = math.prod(self.shape[: self.dim])
        return pieces, self.shard_padded_numel // max(pieces, 1)

    def in_shard(self, shard: torch.Tensor) -> torch.Tensor:
        """Return this rank's part as a 1-D view into the 1-D ``shard``, without padding."""
        return shard[self.shard_offset : self.shard_offset + self.shard_numel]

    def in_full(self, full: torch.Tensor) -> torch.Tensor:
        """Return the parameter as a view into the 1-D ``full`` buffer, in its own shape."""
        return full[self.full_offset : self.full_offset + self.numel].view(self.shape)

    def own_part(self, value: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the full ``value``, 1-D; only for ``dim`` 0, where it is contiguous."""
        start, end = self.shard_range
        return value.detach().reshape(-1)[start:end]

    @torch.no_grad()
    def store(self, value: torch.Tensor, shard: torch.Tensor) -> None:
        """Copy this rank's part of the full ``value`` to its place in ``shard``."""
        if self.shard_numel:
            self.in_shard(shard).copy_(self.own_part(value))


@dataclass(frozen=True)
class UnitLayout:
    """The layout of a whole unit for one rank.

    If ``rank_major``, the gathered buffer has to be copied into the full one; otherwise both are the same
    memory. If ``whole``, gradients are always reduced together, with zeros for missing ones; otherwise any
    subset of the parameters can be reduced.
    """

    world_size: int
    rank: int
    segments: tuple[Segment, ...]
    shard_numel: int
    full_numel: int
    rank_major: bool
    whole: bool
    # The first ``grouped`` parameters may have their own collectives (``gather.py``).
    grouped: int = 0

    @property
    def gathered_numel(self) -> int:
        """Return the elements of the all-gather output: every rank's shard with its padding."""
        return self.world_size * self.shard_numel

    def store(self, values: Sequence[torch.Tensor], shard: torch.Tensor) -> None:
        """Copy this rank's part of the full ``values``, one for each parameter, into ``shard``."""
        for segment, value in zip(self.segments, values, strict=True):
            segment.store(value, shard)

    def placed(self, starts: Sequence[int]) -> "UnitLayout":
        """Return the same layout with the parameters at other ``starts`` in the full buffer."""
        pairs = zip(self.segments, starts, strict=True)
        return replace(self, segments=tuple(replace(each, full_offset=start) for each, start in pairs))

    @cached_property
    def parameter_numel(self) -> int:
        """Return the elements of the parameters, without padding."""
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
        """Return how many parameters are sharded on dim 0. They come first and share one fused copy."""
        return sum(segment.dim == 0 for segment in self.segments)

    @cached_property
    def interleaved(self) -> bool:
        """Return whether some parameter is sharded on a dim other than 0."""
        return self.fused < len(self.segments)

    @cached_property
    def split_sizes(self) -> tuple[int, ...]:
        """Return the padded size of each part in one shard, for the parameters sharded on dim 0."""
        return tuple(segment.shard_padded_numel for segment in self.segments[: self.fused])


def _align(numel: int, element_size: int) -> int:
    step = max(1, ALIGNMENT_BYTES // element_size)
    return -(-numel // step) * step


def chunk_rows(rows: int, world_size: int, rank: int) -> tuple[int, int]:
    """Return the rows ``[start, end)`` that ``torch.chunk`` gives to ``rank``; empty past the last chunk."""
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
        shapes: shape of each parameter, with at least one dimension (``make_units`` rejects scalars).
        element_size: bytes of the widest dtype of the full buffer, for alignment.
        dims: the sharded dim of each parameter, by default 0. Parameters with another dim must divide
            evenly (``check_even``) and come last (``order_for_groups``).
        grouped: the first ``grouped`` parameters may have their own collectives.
    """
    dims = [0] * len(shapes) if dims is None else dims
    segments: list[Segment] = []
    shard_offset = full_offset = 0
    for shape, dim in zip(shapes, dims, strict=True):
        segment = _chunked_segment(tuple(shape), dim, world_size, rank, shard_offset, full_offset)
        segments.append(segment)
        # One rank: the parameters are views of the shard, so the shard has to be aligned.
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
    # Enough rows for any group size that divides this one (``smaller_group.py``), whatever dim is sharded.
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


# Fused copies between flat buffers and tensors: the copy-out of an all-gather's rank-major output, the
# copy-in to a reduce-scatter's input, and the split of a reduced gradient.
#
# ::
#
#     gathered    a0 b0 | a1 b1 | a2 b2       a row a rank
#     full        a0 a1 a2   b0 b1 b2         each parameter contiguous


def places(layout: "UnitLayout", full: torch.Tensor) -> list[torch.Tensor]:
    """Return views of shape (ranks, padded part) into ``full`` (1-D), one a parameter sharded on dim 0."""
    ranks = layout.world_size
    return [
        full[segment.full_offset : segment.full_offset + segment.shard_padded_numel * ranks].view(ranks, -1)
        for segment in layout.segments[: layout.fused]
    ]


class CopyOut:
    """The copy-out: fills a unit's full buffer from the all-gather output. All views are made once.

    Args:
        layout: rank-major layout of the gather.
        full: 1-D buffer of the parameters; its storage may be freed and allocated again.
        source: the tensor that every call copies, if it is always the same one and on the CPU. Separate
            copies are cheaper there than a split, and neighbours of equal size become one copy.
    """

    def __init__(self, layout: "UnitLayout", full: torch.Tensor, source: torch.Tensor | None = None) -> None:
        self._layout = layout
        self._parts: list[torch.Tensor] = []
        self._fused = places(layout, full)
        if source is not None and not layout.interleaved:
            self._join_neighbours(full, source)
        # Parameters sharded on a dim other than 0.
        self._interleaved = [
            full[s.full_offset : s.full_offset + s.numel].view(s.blocks[0], layout.world_size, s.blocks[1])
            for s in layout.segments[layout.fused :]
        ]

    def _join_neighbours(self, full: torch.Tensor, source: torch.Tensor) -> None:
        """View each run of equally sized parameters as (ranks, parameters, part), in source and target."""
        ranks, row = self._layout.world_size, self._layout.shard_numel
        self._fused = []
        for numel, run in groupby(self._layout.segments, attrgetter("shard_padded_numel")):
            first, *others = run
            shape = (ranks, 1 + len(others), numel)
            step = others[0].full_offset - first.full_offset if others else numel
            self._fused.append(full.as_strided(shape, (numel, step, 1), first.full_offset))
            self._parts.append(source.as_strided(shape, (row, numel, 1), first.shard_offset))

    def __call__(self, gathered: torch.Tensor) -> None:
        """Copy out ``gathered`` (1-D: ranks x shard, in the full buffer's dtype) on the current stream."""
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
    """Chunk ``gradients`` on dim 0 and copy them into ``out`` (ranks, elements of a rank), cast to its dtype.

    No gradient may be empty.
    """
    rows = out.shape[0]
    if out.device.type == "cpu" and gradients[0].dtype != out.dtype:
        out.copy_(chunk_cat(gradients, 0, rows))  # on the CPU, chunk_cat with a cast is slow: row by row
    else:
        chunk_cat(gradients, 0, rows, out=out)


class Cuts:
    """Splits a 1-D buffer into parts with shapes. Parts may be in any order and have gaps between them.

    Args:
        numel: elements of the buffer.
        starts: offset of each part.
        shapes: shape of each part. Parts do not overlap.
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
        """Return the parts in order. They share the memory of ``buffer``, but autograd sees no views."""
        pieces = buffer.unsafe_split_with_sizes(self._sizes)
        parts = list(pieces) if self._as_split else [pieces[index] for index in self._which]
        for index, shape in self._shaped:
            parts[index] = parts[index].view(shape)
        return parts
