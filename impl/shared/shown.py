"""Where modules show a unit's parameters, and putting the sharded or the unsharded ones there.

A registry (``module._parameters``, or ``module.__dict__`` for plain attributes) is filled by one call each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, Protocol

import torch
from torch import nn


@dataclass(frozen=True)
class ModulePlace:
    """Where a parameter is registered; a parameter tied inside its unit has several places."""

    module: nn.Module
    name: str


class _HasPlaces(Protocol):
    places: tuple[ModulePlace, ...]


Assignments = list[tuple[dict[str, Any], dict[str, torch.Tensor]]]
"""For each module, its registry and the parameters to show there, by name."""


def assignments(
    parameters: Iterable[_HasPlaces],
    values: Sequence[torch.Tensor],
    registry_of: Callable[[nn.Module], dict[str, Any]],
) -> Assignments:
    """Show each value at all places of its parameter, in the order of the parameters."""
    by_module: dict[nn.Module, dict[str, torch.Tensor]] = {}
    for parameter, value in zip(parameters, values, strict=True):
        for place in parameter.places:
            by_module.setdefault(place.module, {})[place.name] = value
    return [(registry_of(module), shown) for module, shown in by_module.items()]


def show(where: Assignments) -> None:
    """Put every parameter in its places."""
    for registry, shown in where:
        registry.update(shown)


def is_shown(where: Assignments) -> bool:
    """Whether every place still holds what was put there."""
    return all(all(map(is_, map(registry.get, shown), shown.values())) for registry, shown in where)
