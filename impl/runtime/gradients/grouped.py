"""Reduce-scatters that read gradients where autograd left them (``collectives/grouped.py`` has the picture).

A large parameter's gradient is contiguous, and its rows are the parts of all ranks one after the other: what
a reduce-scatter of it alone takes. The rest of the unit is laid into one packed input, as before. The results
are in one buffer, which becomes the sharded gradients::

    gradients   a        b        c  d  --copy--> c0 d0 | c1 d1
                |        |                         |
    result      a1       b1                       c1 d1       on rank 1
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ...collectives import comm
from ...collectives.grouped import has_own_collective
from ...shared.torch_internals import chunk_cat
from ..unit import Unit


class GroupedReduce:
    """The reduce-scatters of one unit's gradients, issued as one; it holds its inputs.

    Args:
        which: indices of the parameters, in order of ``gradients``.
    """

    def __init__(self, unit: Unit, which: Sequence[int], gradients: Sequence[torch.Tensor]) -> None:
        layout, dtype = unit.layout, unit.precision.reduce
        sizes = [layout.segments[index].shard_padded_numel for index in which]
        large = _in_place(unit, which, gradients)
        packed = [position for position in range(len(which)) if position not in large]
        self.offsets = [0] * len(which)
        """Where each one's part starts in ``output``."""
        self.inputs: list[torch.Tensor] = []
        self.outputs: list[torch.Tensor] = []
        self.output = torch.empty(sum(sizes), dtype=dtype, device=unit.device)
        start = 0
        for position in (*large, *packed):
            self.offsets[position] = start
            if position in large:
                self.inputs.append(gradients[position].view(-1))
                self.outputs.append(self.output[start : start + sizes[position]])
            start += sizes[position]
        if packed:
            numel = sum(sizes[position] for position in packed)
            source = torch.empty(layout.world_size, numel, dtype=dtype, device=unit.device)
            chunk_cat([gradients[position] for position in packed], 0, layout.world_size, out=source)
            self.inputs.append(source.view(-1))
            self.outputs.append(self.output[start - numel :])

    def start(self, group: ProcessGroup, operation: object, async_op: bool) -> dist.Work | None:
        """Issue them on the current stream."""
        return comm.reduce_scatter_grouped(self.outputs, self.inputs, group, operation, async_op)


def groups_gradients(unit: Unit, average: comm.Averaging) -> bool:
    """Whether a unit's gradients are reduced this way: nothing else reduces them or works on them before."""
    same = unit.precision.reduce == unit.precision.compute
    own = bool(unit.layout.grouped) and not unit.gradients.replaced and unit.gathers
    return own and same and average.before == 1


def _in_place(unit: Unit, which: Sequence[int], gradients: Sequence[torch.Tensor]) -> list[int]:
    layout, dtype = unit.layout, unit.precision.reduce
    return [
        position
        for position, (index, gradient) in enumerate(zip(which, gradients, strict=True))
        if index < layout.grouped
        and gradient.dtype == dtype
        and has_own_collective(layout.segments[index], gradient, layout)
    ]
