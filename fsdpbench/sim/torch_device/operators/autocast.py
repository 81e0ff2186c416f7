"""`torch.autocast("sim")`: operators in lower precision and in float32. Also optimizer steps on the host.

The lists in `names.toml` are CUDA's. As on CUDA, casts of leaf parameters are kept until the outermost
autocast context ends: each cast runs once per step, and its result takes memory.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from fsdpbench.base.files.documents import table_beside
from fsdpbench.base.torch_internals import DispatchKey, DispatchKeySet, ExcludeDispatchKeyGuard
from fsdpbench.sim.torch_device.accelerator import ACCELERATOR

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


_PASSES_UNFUSED = 3
"""Factor on memory traffic: AdamW's dozen operators access 21 tensors, the fused kernel 7."""


def register_host_optimizer() -> None:
    """Add the cost of optimizer steps on offloaded parameters, from now on in this process.

    The host executes the steps on its own tensors in real time. Their simulated time is the bytes moved
    divided by a rank's share of memory bandwidth (`host_link.memory_gb_s`):
        parameter and states are read and written, the gradient is read         a fused step
        three times that, because each operator goes through memory again       foreach and loops
    """
    register_optimizer_step_post_hook(_charge)


def _charge(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not ACCELERATOR.started:
        return
    if ACCELERATOR.sanitizer is not None:
        ACCELERATOR.sanitizer.step_ended(optimizer)
    nbytes = 0
    for group in optimizer.param_groups:
        passes = 1 if group.get("fused") else _PASSES_UNFUSED
        for parameter in group["params"]:
            if parameter.grad is not None and _local(parameter).device.type == "cpu":
                nbytes += passes * _bytes_of_step(parameter, optimizer.state[parameter])
    ACCELERATOR.timeline.cpu += round(nbytes * ACCELERATOR.host_ns_per_byte)


def _bytes_of_step(parameter: torch.Tensor, state: Mapping[str, object]) -> int:
    """Return the bytes that one pass over one parameter reads and writes."""
    local, gradient = _local(parameter), _local(parameter.grad)
    states = [_local(value) for value in state.values() if isinstance(value, torch.Tensor)]
    kept = sum(tensor.nbytes for tensor in states if tensor.shape == local.shape)
    return 2 * (local.nbytes + kept) + gradient.nbytes


def _local(tensor: Any) -> torch.Tensor:
    """Return a DTensor's local part, or any other tensor unchanged."""
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return part
