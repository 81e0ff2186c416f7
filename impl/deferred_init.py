"""Meta-device modules: give a unit's parameters memory and values just before they are sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn


def materialise(
    modules: Iterable[nn.Module], device: torch.device, param_init_fn: Callable[[nn.Module], None] | None
) -> None:
    """Materialise those of ``modules`` that hold meta-device parameters or buffers, one by one.

    Each is given to ``param_init_fn``; without one, it gets empty memory and its own ``reset_parameters`` is
    called.

    Raises:
        ValueError: a module has no ``reset_parameters``, or its parameters are still on the meta device
            afterwards.
    """
    modules = list(modules)
    tied = _tied_places(modules)
    for module in modules:
        if not _on_meta(module):
            continue
        kind = type(module).__name__
        if param_init_fn is not None:
            param_init_fn(module)
        else:
            reset = getattr(module, "reset_parameters", None)
            if not callable(reset):
                raise ValueError(
                    f"{kind} is on the meta device and has no reset_parameters(): "
                    "define one, or pass param_init_fn"
                )
            module.to_empty(device=device, recurse=False)
            with torch.no_grad():
                reset()
        if _on_meta(module):
            raise ValueError(
                f"param_init_fn left parameters of {kind} on the meta device; it must materialise them"
            )
    for (first, first_name), *others in tied:
        for module, name in others:
            module._parameters[name] = first._parameters[first_name]


def _tied_places(modules: list[nn.Module]) -> list[list[tuple[nn.Module, str]]]:
    """For each meta-device parameter that is registered several times, its places."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in modules:
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.device.type == "meta":
                places.setdefault(parameter, []).append((module, name))
    return [found for found in places.values() if len(found) > 1]


def _on_meta(module: nn.Module) -> bool:
    tensors = (*module._parameters.values(), *module._buffers.values())
    return any(tensor is not None and tensor.device.type == "meta" for tensor in tensors)
