"""Large tensors of the host are not filled with random numbers, nor converted: the device would not see them.

A script that builds a model of billions of parameters on the host spends a minute on their first values,
and as many bytes; here their memory stays untouched (zeros) until something else writes it. Small tensors are
filled as before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import init

from fsdpbench.base.torch_internals import parse_to
from fsdpbench.script.interposing import around

_LARGE = 1 << 20
"""Elements from which a tensor stays untouched."""
_FILLS = ("normal_", "uniform_", "log_normal_", "exponential_", "cauchy_")
_CONVERSIONS = ("bfloat16", "half", "float", "double")
"""Methods, named as their dtypes."""


def skip_large_fills() -> None:
    """Skip the fills from now on; for a process that belongs to a simulated script."""
    kind: Any = torch.Tensor
    for name in _FILLS:
        around(kind, name, _not_filling)
    for name in ("trunc_normal_", "_no_grad_trunc_normal_"):
        if hasattr(init, name):
            around(init, name, _not_filling)
    for name in _CONVERSIONS:
        around(kind, name, functools.partial(_not_converting, lambda *_, name=name: getattr(torch, name)))
    around(kind, "to", functools.partial(_not_converting, _dtype_of))


def _not_filling(original: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
    if not _is_large(tensor) or kwargs.get("generator") is not None:
        return original(tensor, *args, **kwargs)
    _mark(tensor)
    return tensor


def _not_converting(
    dtype_of: Callable[..., Any], original: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any
) -> Any:
    untouched = _is_large(tensor) and hasattr(tensor.untyped_storage(), "_sim_untouched")
    if untouched and not (torch.is_grad_enabled() and tensor.requires_grad):
        dtype = dtype_of(args, kwargs)
        if dtype is not None and dtype != tensor.dtype:
            made = torch.empty_like(tensor, dtype=dtype)
            _mark(made)
            return made
    return original(tensor, *args, **kwargs)


def _dtype_of(args: Any, kwargs: Any) -> torch.dtype | None:
    """Return the dtype that `Tensor.to` is asked for, where the tensor stays on the host; None otherwise."""
    try:
        device, dtype, _, _ = parse_to(*args, **kwargs)
    except (TypeError, RuntimeError):
        return None
    found: torch.dtype | None = dtype if device is None or device.type == "cpu" else None
    return found


def _mark(tensor: torch.Tensor) -> None:
    storage: Any = tensor.untyped_storage()
    storage._sim_untouched = True


def _is_large(tensor: Any) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.is_cpu and tensor.numel() >= _LARGE
