"""Making tensors of the device, views of them, and their twins on the meta device.

They are plain `torch.Tensor` objects (no subclass, no mode): nothing of torch can tell them from an
accelerator's.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch

from fsdpbench.sim.torch_device.accelerator import DEVICE_TYPE
from fsdpbench.sim.torch_device.storage import attach, borrow
from fsdpbench.torch_internals import (
    DispatchKey,
    DispatchKeySet,
    ForceDispatchKeyGuard,
    create_empty_tensor,
    reinterpret_tensor,
    set_storage_by_key,
)

_META = DispatchKey.Meta
_create: Any = create_empty_tensor
# The meta device's kernels change geometry only, and take any tensor: views share the storage of their base.
# With its key alone in force `as_strided` goes there (cheaper than a call by key; the guard that includes a
# key is no way, since torch 2.11 keeps the key's device after it). Most views need no operator at all.
_Key: Any = DispatchKey
_Keys = DispatchKeySet
_ABOVE = (_Key.ADInplaceOrView, _Key.AutogradPrivateUse1, _Key.AutogradMeta, _Key.AutocastPrivateUse1)
_ONLY_META = (_Keys(_META), functools.reduce(operator.or_, map(_Keys, _ABOVE)))
_force_keys = ForceDispatchKeyGuard
_as_strided = torch.as_strided
_reinterpret = reinterpret_tensor
_inference_mode = torch.is_inference_mode_enabled
# torch's own getter: where a user's script runs, `device.type` reads "cuda" (`fsdpbench/script`).
_type_of: Any = torch.device.type.__get__  # type: ignore[attr-defined]
_set_storage = set_storage_by_key


def new_tensor(
    shape: Sequence[int], strides: Sequence[int] | None, dtype: torch.dtype, nbytes: int
) -> torch.Tensor:
    """A new tensor with its own memory; ``strides`` None: contiguous. Raises torch.OutOfMemoryError."""
    tensor = _create(shape, dtype)
    attach(tensor.untyped_storage(), nbytes)
    return tensor if strides is None else _reinterpret(tensor, shape, strides, 0)


def new_view(
    base: torch.Tensor, shape: Sequence[int], strides: Sequence[int], offset: int, dtype: torch.dtype
) -> torch.Tensor:
    """A tensor on the storage of ``base``; ``offset`` and strides in elements of ``dtype``."""
    if dtype is base.dtype:
        # What is made now belongs to the mode, a view to its base: `as_strided` heeds that.
        if not (base.is_inference() or _inference_mode()):
            return _reinterpret(base, shape, strides, offset - base.storage_offset())
        with _force_keys(*_ONLY_META):
            return _as_strided(base, shape, strides, offset)
    return _set_storage(_META, _create((0,), dtype), base.untyped_storage(), offset, shape, strides)


def same_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the memory of ``tensor`` that starts a storage of its own, as one that went through
    DLPack."""
    nbytes = extent(tensor) * tensor.element_size()
    copy = _create((0,), tensor.dtype)
    offset = int(tensor.storage_offset()) * tensor.element_size()
    borrow(copy.untyped_storage(), tensor.untyped_storage(), offset, nbytes)
    return set_geometry(copy, copy.untyped_storage(), 0, tensor.shape, tensor.stride())


def set_geometry(
    tensor: torch.Tensor,
    storage: torch.UntypedStorage,
    offset: int,
    shape: Sequence[int],
    strides: Sequence[int],
) -> torch.Tensor:
    """Point an existing tensor at a storage, with another geometry."""
    return _set_storage(_META, tensor, storage, offset, shape, strides)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides, as torch computes them (a dimension of size 0 counts as 1)."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def is_on_device(tensor: torch.Tensor) -> bool:
    """Whether a tensor lives on the simulated device."""
    return _type_of(tensor.device) == DEVICE_TYPE


def is_simulated(device: torch.device) -> bool:
    """Whether a device is the simulated one, whatever it calls itself."""
    return _type_of(device) == DEVICE_TYPE


def extent(tensor: torch.Tensor) -> int:
    """Elements of the storage between a tensor's first and last element, both included."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def meta_twin(value: Any) -> Any:
    """The same argument for the meta device: tensors, lists of tensors and devices are replaced."""
    if isinstance(value, torch.Tensor):
        if value.device.type == "cpu" and value.dim() == 0:
            return value  # operators take wrapped numbers and CPU scalars beside tensors of any device
        offset = value.storage_offset()
        if offset == 0:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        base = torch.empty((offset + extent(value),), dtype=value.dtype, device="meta")
        return base.as_strided(value.shape, value.stride(), offset)
    if isinstance(value, (list, tuple)):
        return [meta_twin(item) for item in value]
    if isinstance(value, torch.device) and is_simulated(value):
        return torch.device("meta")
    return value


def tensors_in(args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """All tensors of a call, in order, those in lists included."""
    found: list[torch.Tensor] = []
    for value in args:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(item for item in value if isinstance(item, torch.Tensor))
    if kwargs:
        found.extend(tensors_in(tuple(kwargs.values()), {}))
    return found
