"""Which of its tensors an operator reads and writes, by its schema, with what schemas do not say.

An alias annotation with an exclamation mark is a write. Reads are all other tensors, except where only their
shape counts (`zeros_like`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fsdpbench.sim.followers.sanitizer.regions import region_of
from fsdpbench.sim.torch_device.followed import Use
from fsdpbench.sim.torch_device.tensors import is_on_device

_ONLY_SHAPES = frozenset(
    "aten::" + name
    for name in (
        "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like",
        "new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full",
    )
)  # fmt: skip
_UNDECLARED_WRITES = {
    # Running mean and variance, which their schemas do not mark.
    "aten::native_batch_norm": ("running_mean", "running_var"),
    "aten::cudnn_batch_norm": ("running_mean", "running_var"),
    "aten::miopen_batch_norm": ("running_mean", "running_var"),
    "aten::batch_norm_update_stats": ("running_mean", "running_var"),
}


def uses_of(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Use, ...]:
    """The uses of a call's tensors, counted as `tensors_in` counts them. Empty tensors and those of the host
    have none."""
    found = []
    for index, (tensor, writes) in enumerate(_with_modes(operator, args, kwargs)):
        if writes is None or not is_on_device(tensor):
            continue
        region = region_of(tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.element_size())
        if region is not None:
            found.append(Use(index, region, writes))
    return tuple(found)


def host_uses(
    operator: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> Iterator[tuple[torch.Tensor, bool]]:
    """Tensors of the host that a call touches, and whether it writes them."""
    for tensor, writes in _with_modes(operator, args, kwargs):
        if writes is not None and tensor.device.type == "cpu":
            yield tensor, writes


def _with_modes(
    operator: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> Iterator[tuple[torch.Tensor, bool | None]]:
    """The call's tensors in order; True: written, False: read, None: neither."""
    schema = operator._schema
    arguments = schema.arguments
    named = {info.name: info for info in arguments}
    ignored = schema.name in _ONLY_SHAPES
    undeclared = _undeclared(schema.name, args, arguments)
    only_read = _only_read(schema.name, kwargs)
    for info, value in [*zip(arguments, args, strict=False), *((named[n], v) for n, v in kwargs.items())]:
        writes: bool | None = info.alias_info is not None and info.alias_info.is_write
        if info.name in undeclared:
            writes = True
        if info.name == only_read:
            writes = False
        if ignored and not writes:
            writes = None
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, torch.Tensor):
                yield tensor, writes


def _undeclared(name: str, args: Sequence[Any], arguments: Sequence[Any]) -> tuple[str, ...]:
    names = _UNDECLARED_WRITES.get(name, ())
    if names and any(info.name == "training" for info in arguments):
        training = [value for info, value in zip(arguments, args, strict=False) if info.name == "training"]
        return names if training and training[0] else ()
    return names


def _only_read(name: str, kwargs: dict[str, Any]) -> str:
    """Fused optimizers declare that they write gradients: they do where they unscale them."""
    return "grads" if name.startswith("aten::_fused_") and kwargs.get("grad_scale") is None else ""
