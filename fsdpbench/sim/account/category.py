"""What a block of memory is for, judged by the place in the program that took it."""

from __future__ import annotations

import re
from enum import StrEnum

from fsdpbench.sim.account.places import OUTSIDE, Phase, Place

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")
_GATHERS = ("all_gather", "unshard")
_REDUCES = ("reduce", "post_backward")


class Category(StrEnum):
    """What holds memory inside the allocator."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer states"
    ACTIVATIONS = "activations"
    RECOMPUTED = "recomputed activations"
    BACKWARD = "gradients on their way"
    ALL_GATHER = "gathered parameters, all-gather buffers"
    REDUCE_SCATTER = "reduce-scatter buffers"
    OPTIMIZER_WORK = "optimizer's temporaries"
    OTHERS = "inputs and others"


def category_of(place: Place, *, modules_known: bool) -> Category:
    """Of a block without a known owner; before the first forward the modules are unknown."""
    span = place.span.lower()
    if place.phase is Phase.BUILDING:
        return Category.OTHERS if modules_known else Category.PARAMETERS
    if place.phase is Phase.OPTIMIZER:
        return Category.OPTIMIZER_WORK
    if any(word in span for word in _GATHERS):
        return Category.ALL_GATHER
    if place.phase is Phase.FORWARD:
        return Category.ACTIVATIONS
    if any(word in span for word in _REDUCES):
        return Category.REDUCE_SCATTER
    return Category.BACKWARD if place.module == OUTSIDE else Category.RECOMPUTED


def layers_as_one(module: str) -> str:
    """The path of a module with the numbers of layers left open: ``blocks.*.attention``."""
    return _NUMBER.sub("*", module)
