"""Puts the variation that a configuration names in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from fsdpbench.script.observed.waits import Waits
from fsdpbench.script.variations.batches import Batches
from fsdpbench.script.variations.host import LoaderTime, NoWaits
from fsdpbench.script.variations.keeping import NotKept
from fsdpbench.script.variations.kinds import Variation, parse_variation
from fsdpbench.script.variations.programs import (
    Compiled,
    ForwardPrefetch,
    Fused,
    NoForwardPrefetch,
    NoneGrads,
)
from fsdpbench.script.variations.recomputing import Checkpointed, NotCheckpointed
from fsdpbench.script.variations.sharding import Argument
from fsdpbench.script.variations.units import Blocks, Pairs, Root
from fsdpbench.sim import Simulation


class _Part(Protocol):
    @property
    def count(self) -> int: ...


_SIMPLE: Mapping[Variation, Callable[[], _Part]] = {
    Variation.CHECKPOINT: Checkpointed,
    Variation.NO_CHECKPOINT: lambda: NotCheckpointed(every=1),
    Variation.HALF_CHECKPOINT: lambda: NotCheckpointed(every=2),
    Variation.HALF_BATCH: lambda: Batches(0.5, parser=False),
    Variation.DOUBLE_BATCH: lambda: Batches(2.0, parser=True),
    Variation.WRAP_BLOCKS: Blocks,
    Variation.WRAP_ROOT: Root,
    Variation.WRAP_PAIRS: Pairs,
    Variation.FUSED: Fused,
    Variation.NONE_GRADS: NoneGrads,
    Variation.COMPILE: Compiled,
    Variation.DETACH_KEPT: lambda: NotKept(host=False),
    Variation.HOST_KEPT: lambda: NotKept(host=True),
}


class Varied:
    """`text`: a variation, or several between `+`, as a configuration writes it. Made before the script
    starts.

    ``count``: how often it changed something.
    """

    def __init__(self, text: str, waits: Waits, simulation: Simulation) -> None:
        first, *_ = parsed = [parse_variation(each) for each in text.split("+")]
        self.variation = first[0]
        self._parts = [part for each in parsed for part in _made(*each, waits, simulation)]

    @property
    def count(self) -> int:
        return sum(part.count for part in self._parts)


def _made(variation: Variation, value: str, waits: Waits, simulation: Simulation) -> list[_Part]:
    if variation in _SIMPLE:
        return [_SIMPLE[variation]()]
    if variation is Variation.NO_WAITS:
        return [NoWaits(waits)]
    if variation is Variation.LOADER_TIME:
        return [LoaderTime(value, simulation)]
    parts: list[_Part] = [Argument(variation)]
    if variation is Variation.PREFETCH:
        parts.append(ForwardPrefetch())
    elif variation is Variation.NO_FORWARD_PREFETCH:
        parts.append(NoForwardPrefetch())
    return parts
