"""From an all-gather's output, which is ordered by rank, to contiguous parameters: one fused copy.

::

    gathered    a0 b0 | a1 b1 | a2 b2       a row a rank
    full        a0 a1 a2   b0 b1 b2         each parameter contiguous
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .layout import UnitLayout
from .torch_internals import foreach_copy_


def places(layout: UnitLayout, full: torch.Tensor, starts: Sequence[int] | None = None) -> list[torch.Tensor]:
    """Where the parameters that are cut on dim 0 are in ``full`` (1-D): views of (ranks, padded part).

    Args:
        starts: where each parameter starts, if not where ``layout`` says.
    """
    if starts is None:
        starts = [segment.full_offset for segment in layout.segments]
    return [
        full[start : start + segment.shard_padded_numel * layout.world_size].view(layout.world_size, -1)
        for start, segment in zip(starts[: layout.fused], layout.segments, strict=False)
    ]


class CopyOut:
    """Fills a unit's full buffer from what was gathered. All views are made once.

    Args:
        layout: of the gather; rank-major.
        full: 1-D, the parameters; its memory may come and go.
        starts: where each parameter starts in ``full``, if not where ``layout`` says.
        source: what every call copies, where that is one tensor of the CPU: there one copy after the other
            costs less than to split again.
    """

    def __init__(
        self,
        layout: UnitLayout,
        full: torch.Tensor,
        starts: Sequence[int] | None = None,
        source: torch.Tensor | None = None,
    ) -> None:
        self._layout = layout
        self._parts: list[torch.Tensor] = []
        if source is not None and not layout.interleaved:
            rows = source.view(layout.world_size, -1)
            self._parts = list(rows.split_with_sizes(layout.split_sizes, 1))
        self._fused = places(layout, full, starts)
        self._interleaved = [
            full[s.full_offset : s.full_offset + s.numel].view(s.blocks[0], layout.world_size, s.blocks[1])
            for s in layout.segments[layout.fused :]
        ]
        """Parameters that are cut on another dim than the first."""

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
