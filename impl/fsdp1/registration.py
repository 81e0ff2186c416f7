"""In which order a unit's parameters are registered in their modules, and so listed in state dicts: torch's.

torch takes all parameters of a unit out of their modules and puts them back: each at its first name, then the
further names of tied ones, as it meets them. So a tied weight comes behind the other parameters of a module::

    head.weight (tied to embed.weight), head.bias    ->    head.bias, head.weight
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

from torch import nn

from ..runtime.presentation import ModulePlace, UnitParameter
from ..shared.names import CHECKPOINTED
from ..shared.torch_internals import ActivationWrapper


def without_activation_wrapper(module: nn.Module) -> nn.Module:
    """Return what a wrapper for activation checkpointing or offloading holds, other modules as they are."""
    return cast(nn.Module, module._modules[CHECKPOINTED]) if isinstance(module, ActivationWrapper) else module


Registration = Sequence[tuple[int, ModulePlace]]
"""Indices of parameters with their places, in order."""


def registration_order(root: nn.Module, parameters: Sequence[UnitParameter]) -> Registration:
    """The order for a unit whose parameters are still registered below ``root``."""
    places = {
        (place.module, place.name): (index, place)
        for index, parameter in enumerate(parameters)
        for place in parameter.places
    }
    if len(places) == len(parameters):
        return list(places.values())
    first = {(parameter.places[0].module, parameter.places[0].name) for parameter in parameters}
    order = {key: place for key, place in places.items() if key in first}
    for module in _visits(root, frozenset()):
        for name in module._parameters:
            key = (module, name)
            if key in first:
                first.remove(key)  # met again, it is one of the further names
            elif key in places:
                order.pop(key, None)
                order[key] = places[key]
    return list(order.values())


def _visits(module: nn.Module, above: frozenset[nn.Module]) -> Iterator[nn.Module]:
    """All modules, one with several names once for each; none inside of itself."""
    if module in above:
        return
    yield module
    for child in module._modules.values():
        if child is not None:
            yield from _visits(child, above | {module})


def register_in_order(order: Registration) -> None:
    """Let the modules list the parameters that they show in ``order``."""
    for _, place in order:
        registry = place.module._parameters
        registry[place.name] = registry.pop(place.name)
