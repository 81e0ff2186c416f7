"""Materialise modules without data: allocate and initialise a unit's parameters before they are sharded.

There are three ways, in this order: the user's ``param_init_fn``; the replay of a ``deferred_init()``
recording (``recording.py``); ``reset_parameters()`` of modules on the meta device.
"""

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ..shared import error_text
from ..shared.torch_internals import make_subclass
from .recording import Deferred, Tape, deferred_of, window_of, written_since

InitFunction = Callable[[nn.Module], None]


def materialise(
    modules: Iterable[nn.Module],
    device: torch.device,
    param_init_fn: InitFunction | None,
    ignored: set[nn.Parameter],
) -> dict[nn.Parameter, nn.Parameter]:
    """Materialise those of ``modules`` that hold parameters or buffers without data.

    Recorded tensors are replayed on the device of the recording; others are made on ``device``, one module
    at a time. If any module has no data, ``param_init_fn`` is called with each of ``modules``, as in torch.

    Args:
        ignored: parameters that belong to no unit. The set is updated with their replacements.

    Returns:
        The new parameter for each parameter whose recording was replayed.

    Raises:
        ValueError: a module has no ``reset_parameters``, its parameters are still on the meta device
            afterwards, or it was changed after its recording.
    """
    if param_init_fn is not None and not callable(param_init_fn):
        raise ValueError(f"Expected param_init_fn {param_init_fn!r} to be callable: a function of a module")
    modules = list(modules)
    replayed = _replay(modules) if param_init_fn is None else {}
    ignored.update(new for old, new in replayed.items() if old in ignored)
    tied = _tied_places(modules)
    without_data = [module for module in modules if _on_meta(module)]
    if param_init_fn is not None and without_data:
        for module in modules:
            param_init_fn(module)
    for module in without_data:
        if param_init_fn is None:
            _reset(module, device)
        if _on_meta(module):
            raise ValueError(error_text("materialise.left", type(module).__name__))
    for (first, first_name), *others in tied:
        for module, name in others:
            module._parameters[name] = first._parameters[first_name]
    return replayed


def materialise_deferred(module: nn.Module) -> None:
    """Replay the ``deferred_init()`` recording for ``module`` and all modules inside it, without FSDP.

    ::

        for block in model.blocks:
            materialise_deferred(block)
            fully_shard(block)
    """
    _replay(list(module.modules()))


def _reset(module: nn.Module, device: torch.device) -> None:
    kind = type(module).__name__
    reset = getattr(module, "reset_parameters", None)
    if not callable(reset):
        raise ValueError(error_text("materialise.initialise", kind))
    module.to_empty(device=device, recurse=False)
    try:
        with torch.no_grad():
            reset()
    except Exception as error:
        warnings.warn(f"reset_parameters() of {kind} failed on the meta device: {error}", stacklevel=2)
        raise


# -- replaying -----------------------------------------------------------------------------------------------


def _replay(modules: list[nn.Module]) -> dict[nn.Parameter, nn.Parameter]:
    """Materialise the deferred tensors of ``modules`` and return the new parameter for each old one."""
    wanted: dict[int, tuple[Tape, set[int]]] = {}
    for module in modules:
        for _, name, tensor, entry in _deferred_places(module):
            if written_since(tensor):
                raise ValueError(error_text("materialise.replay", name, type(module).__name__))
            wanted.setdefault(id(entry.tape), (entry.tape, set()))[1].add(entry.storage)
    if not wanted:
        return {}
    data = {key: tape.replay(storages) for key, (tape, storages) in wanted.items()}
    made: dict[torch.Tensor, torch.Tensor] = {}
    for module in modules:
        for registry, name, tensor, entry in _deferred_places(module):
            if tensor not in made:
                real = window_of(tensor, entry).on(data[id(entry.tape)][entry.storage])
                made[tensor] = _same_kind(tensor, real)
            registry[name] = made[tensor]
    pairs = made.items()
    return {a: b for a, b in pairs if isinstance(a, nn.Parameter) and isinstance(b, nn.Parameter)}


def _deferred_places(module: nn.Module) -> list[tuple[dict[str, Any], str, torch.Tensor, Deferred]]:
    """Return (registry, name, tensor, entry) of deferred parameters, buffers and attributes of ``module``."""
    found: list[tuple[dict[str, Any], str, torch.Tensor, Deferred]] = []
    registries: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, module.__dict__)
    for registry in registries:
        for name, value in registry.items():
            entry = deferred_of(value) if isinstance(value, torch.Tensor) else None
            if entry is not None:
                found.append((registry, name, value, entry))
    return found


def _same_kind(deferred: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Return ``real`` as a parameter with the attributes of ``deferred``, if ``deferred`` is a parameter."""
    if isinstance(deferred, nn.Parameter):
        made = make_subclass(type(deferred), real, deferred.requires_grad)
        made.__dict__.update(deferred.__dict__)
        return made
    return real.requires_grad_(deferred.requires_grad)


# -- meta modules --------------------------------------------------------------------------------------------


def _tied_places(modules: list[nn.Module]) -> list[list[tuple[nn.Module, str]]]:
    """Return the places of each meta-device parameter that is registered several times."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in modules:
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.device.type == "meta":
                places.setdefault(parameter, []).append((module, name))
    return [found for found in places.values() if len(found) > 1]


def _on_meta(module: nn.Module) -> bool:
    tensors = (*module._parameters.values(), *module._buffers.values())
    return any(tensor is not None and tensor.device.type == "meta" for tensor in tensors)
