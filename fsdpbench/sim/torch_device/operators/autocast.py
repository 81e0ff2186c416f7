"""`torch.autocast("sim")`: operators in lower precision and in float32.

The lists in `names.toml` are CUDA's. As on CUDA, casts of leaf parameters are kept until the outermost
autocast context ends: each cast runs once per step, and its result takes memory.
"""

from collections.abc import Callable
from typing import Any

import torch

from fsdpbench.base.files.documents import table_beside
from fsdpbench.base.torch_internals import DispatchKey, DispatchKeySet, ExcludeDispatchKeyGuard

_KEY = "AutocastPrivateUse1"
_OPERATORS = table_beside(__file__, "names.toml")["autocast"]


class _CastCache:
    """Casts of leaf parameters. It holds the parameters, so that no other tensor can reuse the id of one."""

    def __init__(self) -> None:
        self._casts: dict[tuple[int, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = {}

    def clear(self) -> None:
        self._casts.clear()

    def cast(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if not (tensor.is_leaf and tensor.requires_grad and torch.is_autocast_cache_enabled()):
            return tensor.to(dtype)
        key = (id(tensor), dtype)
        found = self._casts.get(key)
        if found is None:
            found = self._casts[key] = (tensor, tensor.to(dtype))
        return found[1]


CAST_CACHE = _CastCache()


def register_autocast() -> list[torch.library.Library]:
    """Register the lists; the caller must keep the returned libraries."""
    every = torch.library.Library("_", "IMPL")
    every.fallback(torch.library.fallthrough_kernel, _KEY)
    aten = torch.library.Library("aten", "IMPL")
    for name in _OPERATORS["lower_precision"]:
        aten.impl(name, _casting(_operator(name), None), _KEY)
    for name in _OPERATORS["float32"]:
        aten.impl(name, _casting(_operator(name), torch.float32), _KEY)
    for name in _OPERATORS["float32_unless_given"]:
        aten.impl(name, _with_dtype(_operator(name)), _KEY)
    return [every, aten]


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _casting(operator: Any, dtype: torch.dtype | None) -> Callable[..., Any]:
    """Return the operator with its floating-point tensors cast to `dtype` (None: autocast's dtype)."""
    excluded = DispatchKeySet(getattr(DispatchKey, _KEY))

    def kernel(*args: Any, **kwargs: Any) -> Any:
        target = torch.get_autocast_dtype("sim") if dtype is None else dtype
        with ExcludeDispatchKeyGuard(excluded):
            return operator(
                *(_cast(value, target) for value in args),
                **{name: _cast(value, target) for name, value in kwargs.items()},
            )

    return kernel


def _with_dtype(operator: Any) -> Callable[..., Any]:
    """Return the operator with an omitted `dtype` set to float32 if the input has lower precision."""
    excluded = DispatchKeySet(getattr(DispatchKey, _KEY))
    place = [argument.name for argument in operator._schema.arguments].index("dtype")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        given = args[place] if place < len(args) else kwargs.get("dtype")
        if given is None and args[0].is_floating_point() and args[0].dtype is not torch.float64:
            args, kwargs = args[:place], {**kwargs, "dtype": torch.float32}
        with ExcludeDispatchKeyGuard(excluded):
            return operator(*args, **kwargs)

    return kernel


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Cast tensors (also in lists) that are floating point, not double, and of another dtype."""
    if isinstance(value, torch.Tensor):
        eligible = value.is_floating_point() and value.dtype not in (dtype, torch.float64)
        return CAST_CACHE.cast(value, dtype) if eligible else value
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(item, dtype) for item in value)
    return value
