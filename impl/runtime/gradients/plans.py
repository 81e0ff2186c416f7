"""What of a unit's reduction is known before it: a plan for each set of parameters that get gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..unit import Unit
from .laying_out import prepares
from .pieces import pieces_of


@dataclass(frozen=True)
class Plan:
    """Start of each part in the reduced shard, elements of the input, how many of those are gradients, the
    pieces in which they are reduced (none: as a whole), and whether gradients have to be prepared
    (``laying_out.py``).
    """

    offsets: list[int]
    numel: int
    used: int
    pieces: Sequence[range]
    prepares: bool


def plan_of(unit: Unit, which: Sequence[int]) -> Plan:
    """The plan for gradients of the parameters ``which``."""
    layout = unit.layout
    segments = [layout.segments[i] for i in which]
    if layout.whole:
        offsets = [segment.shard_offset for segment in segments]
        return Plan(offsets, layout.gathered_numel, layout.parameter_numel, (), prepares(layout, which))
    sizes = [segment.shard_padded_numel for segment in segments]
    offsets = [sum(sizes[:i]) for i in range(len(sizes))]
    numel = sum(sizes) * layout.world_size
    pieces = pieces_of(layout, unit.precision, which) if unit.gathers else ()
    return Plan(offsets, numel, numel, pieces, prepares(layout, which))
