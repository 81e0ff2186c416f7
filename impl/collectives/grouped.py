"""Collectives of single parameters, issued in one call: what is communicated is where computation uses it.

A chunked layout cuts each parameter into rows, so what an all-gather *of that parameter alone* returns is the
parameter, and what a reduce-scatter of its gradient alone takes is the gradient. A unit's large parameters
have a collective each; the small ones share a packed one, whose copy is small. On rank 1 of 2, with the large
parameters a and b and the small ones c and d::

    shard      a1 b1 c1 d1
               |  |  +--+-----------------------------+
    buffer     a0 a1   b0 b1   c0 c1   d0 d1 |  c0 d0 | c1 d1
               ^^^^^   ^^^^^   parameters    |  packed: copied to c and d

All of them are one call into the backend (``*_coalesced``), which NCCL runs as one group of one launch. That
layout is veScale-FSDP's and Megatron-FSDP's aim (no copy around collectives), on parameters that stay
``DTensor(Shard(0))``.

What is packed, always: parameters below ``LARGE_BYTES``, those cut on another dim than the first, gradients
that are not contiguous, whose rows do not divide by the ranks, or that are cast on the way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ..shared.copy_out import CopyOut
from ..shared.layout import Segment, UnitLayout, chunked_layout
from ..shared.settings import CommunicationLayout
from ..shared.torch_internals import foreach_copy_
from . import comm

LARGE_BYTES = 4 << 20
"""A parameter from this size has its own collective. Copying as much takes 3 to 6 us on A100 and H100 (read
and written at 1.4 to 2.6 TB/s), which is what one more member of a group of collectives may take.
"""

_SMALL_SHARE = 8
"""At most one part in so many of a unit is packed beside grouped parameters: it stays with them."""


_COALESCING = ("nccl", "sim", "emulated")
"""Backends whose groups of collectives are one launch."""


def smallest_with_own(layout: CommunicationLayout, backend: str) -> float:
    """Bytes from which a parameter has its own collective; infinite where none has.

    Args:
        backend: the name of the backend that gathers.
    """
    if layout is CommunicationLayout.GROUPED:
        return 0
    packs = layout is CommunicationLayout.PACKED or backend not in _COALESCING
    return math.inf if packs else LARGE_BYTES


def order_for_groups(sizes: Sequence[int], dims: Sequence[int], smallest: float) -> tuple[list[int], int]:
    """In which order parameters are laid out, and how many, the first ones, have their own collective.

    Args:
        sizes: bytes of each parameter while it is gathered.
        dims: the dim on which each is cut.
        smallest: bytes from which one has its own collective.

    Returns:
        Indices (large, then small; or by dim), and the number of large ones: 0 where another dim than the
        first is cut, or where what has to be packed is too large a part of the unit.
    """
    large = [i for i, size in enumerate(sizes) if size >= smallest]
    rest = [i for i, size in enumerate(sizes) if size < smallest]
    if any(dims) or _SMALL_SHARE * sum(sizes[i] for i in rest) > sum(sizes):
        return sorted(range(len(sizes)), key=lambda i: dims[i] > 0), 0
    return large + rest, len(large)


class GroupedGather:
    """The all-gather of one unit, ``layout.grouped`` of whose parameters have their own collective."""

    def __init__(self, layout: UnitLayout, group: ProcessGroup) -> None:
        self._layout = layout
        self._group = group
        large, small = layout.segments[: layout.grouped], layout.segments[layout.grouped :]
        self._large = large
        self._packed = _packed_layout(small, layout) if small else None
        self._starts = [segment.full_offset for segment in small]
        self._shard_sizes = [segment.shard_padded_numel for segment in large]
        self._shard_sizes += [layout.shard_numel - sum(self._shard_sizes)] if small else []
        self._buffer: torch.Tensor | None = None
        self._shard: torch.Tensor | None = None
        self._outputs: list[torch.Tensor] = []
        self._parts: list[torch.Tensor] = []
        self._own: list[torch.Tensor] = []
        self._copy_out: CopyOut | None = None

    @property
    def numel(self) -> int:
        """Elements of the buffer: the parameters, and what is packed of all ranks behind them."""
        packed = self._packed
        return self._layout.full_numel + (0 if packed is None else packed.gathered_numel)

    def bind(self, buffer: torch.Tensor, shard: torch.Tensor) -> None:
        """Make the views of both once.

        Args:
            buffer: of ``numel`` elements; its memory may come and go.
            shard: this rank's, flat.
        """
        if self._buffer is buffer and self._shard is shard:
            return
        layout, ranks = self._layout, self._layout.world_size
        self._buffer, self._shard = buffer, shard
        self._outputs = [
            buffer[segment.full_offset : segment.full_offset + segment.shard_padded_numel * ranks]
            for segment in self._large
        ]
        self._parts = list(shard.split(self._shard_sizes))
        if self._packed is not None:
            self._outputs.append(buffer[layout.full_numel :])
            self._copy_out = CopyOut(self._packed, buffer, self._starts)
        self._own = [output.view(ranks, -1)[layout.rank] for output in self._outputs]

    def cast(self) -> None:
        """Write this rank's shard to its places in the buffer, in the buffer's dtype: one fused cast."""
        foreach_copy_(self._own, self._parts)

    def start(self, *, in_place: bool, async_op: bool) -> dist.Work | None:
        """Issue the all-gathers, of what ``cast`` wrote (``in_place``) or of the shard itself."""
        inputs = self._own if in_place else self._parts
        return comm.all_gather_grouped(self._outputs, inputs, self._group, async_op)

    def copy_out(self) -> None:
        """Fill the small parameters, on the current stream."""
        if self._copy_out is not None:
            self._copy_out(self._outputs[-1])


def _packed_layout(small: Sequence[Segment], layout: UnitLayout) -> UnitLayout:
    shapes = [segment.shape for segment in small]
    packed = chunked_layout(shapes, layout.world_size, layout.rank)
    assert packed.split_sizes == tuple(segment.shard_padded_numel for segment in small)
    return packed


def has_own_collective(segment: Segment, gradient: torch.Tensor, layout: UnitLayout) -> bool:
    """Whether a gradient, in the dtype of reduction, can be reduced where it is."""
    fills = segment.numel == segment.shard_padded_numel * layout.world_size
    return fills and type(gradient) is torch.Tensor and gradient.is_contiguous()
