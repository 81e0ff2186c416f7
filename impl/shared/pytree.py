"""Map over and collect tensors in nested arguments and outputs. A flat tuple of tensors is the fast path."""

from collections import deque
from collections.abc import Callable, Mapping, Set
from dataclasses import fields, is_dataclass, replace
from types import FunctionType
from typing import Any

import torch

TensorFunction = Callable[[torch.Tensor], torch.Tensor]

_HOLD_NONE = (int, float, str, type(None), torch.dtype, torch.device, torch.nn.Module, type, FunctionType)
_MOST_OBJECTS = 100


def map_tensors(function: TensorFunction, value: Any) -> Any:
    """Return ``value`` with ``function`` applied to every tensor in it.

    Recurses into tuples, named tuples, lists, mappings and dataclasses. Other objects are returned unchanged.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, tuple):
        items = [map_tensors(function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list):
        return [map_tensors(function, item) for item in value]
    if isinstance(value, Mapping):
        mapped = {key: map_tensors(function, item) for key, item in value.items()}
        return mapped if type(value) is dict else _same_mapping(value, mapped)
    if is_dataclass(value) and not isinstance(value, type):
        changes = {f.name: map_tensors(function, getattr(value, f.name)) for f in fields(value) if f.init}
        if all(changes[name] is getattr(value, name) for name in changes):
            return value
        return replace(value, **changes)
    return value


def _same_mapping(original: Mapping[Any, Any], mapped: dict[Any, Any]) -> Any:
    """Rebuild a mapping in its own class (ordered dictionaries, model outputs that are dataclasses)."""
    kind: Any = type(original)
    if is_dataclass(original):
        return kind(**mapped)
    return kind(mapped)


def collect_grad_tensors(
    value: Any, found: list[torch.Tensor], objects: set[int] | None = None
) -> list[torch.Tensor]:
    """Append the tensors that require grad to ``found``, in the order in which ``map_tensors`` visits them.
    With ``objects``, the ids of objects already searched, also search the attributes of other objects.
    """
    if isinstance(value, torch.Tensor):
        if value.requires_grad:
            found.append(value)
    elif isinstance(value, (tuple, list)):
        for item in value:
            collect_grad_tensors(item, found, objects)
    elif isinstance(value, Mapping):
        for item in value.values():
            collect_grad_tensors(item, found, objects)
    elif objects is not None:
        _search(value, found, objects)
    elif is_dataclass(value) and not isinstance(value, type):
        for f in fields(value):
            if f.init:
                collect_grad_tensors(getattr(value, f.name), found)
    return found


def _search(value: Any, found: list[torch.Tensor], objects: set[int]) -> None:
    """Search all attributes of an object. References between objects may be cyclic."""
    if isinstance(value, _HOLD_NONE) or id(value) in objects or len(objects) == _MOST_OBJECTS:
        return
    objects.add(id(value))
    slots = (name for kind in type(value).__mro__ for name in kind.__dict__.get("__slots__", ()))
    collect_grad_tensors(getattr(value, "__dict__", {}), found, objects)
    collect_grad_tensors([getattr(value, name, None) for name in slots], found, objects)
    if isinstance(value, (Set, deque)):
        collect_grad_tensors(list(value), found, objects)


def caster(dtype: torch.dtype) -> TensorFunction:
    """Return a function that casts floating point tensors to ``dtype`` and leaves others alone."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype is dtype or not torch.is_floating_point(tensor):
            return tensor
        return tensor.to(dtype)

    return cast


def mover(device: torch.device) -> TensorFunction:
    """Return a function that moves tensors to ``device``."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.device == device else tensor.to(device)

    return move
