"""Optimizer steps on the host, and large host tensors that have a shape and no values.

A simulated rank may offload more than the machine that simulates it has. What the simulator needs of a large
host tensor are its shape, its size and whether it is pinned; no operator has to compute its values. Operators
under `HostShapes` follow these rules:

    a tensor of `LARGE_ON_HOST` bytes   neither read nor written; a result is memory that nothing has touched,
                                        which the operating system therefore never provides
    smaller ones (counts, norms)        computed as usual
    a copy to or from the device        as usual: it takes simulated time, and touches no host memory
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fsdpbench.base.torch_internals import TorchDispatchMode, tree_map_only
from fsdpbench.sim.torch_device.accelerator import ACCELERATOR
from fsdpbench.sim.torch_device.operators.known_values import mark_as_placeholders
from fsdpbench.sim.torch_device.tensors import (
    LARGE_ON_HOST,
    contiguous_strides,
    has_no_values,
    take_pageable,
    zeros_on_host,
)

_HOST, _ATEN = torch.device("cpu"), torch.ops.aten


class HostShapes(TorchDispatchMode):
    """Dispatch mode in which operators on large host tensors compute shapes only."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        with _uncounted():
            super().__init__()

    def __enter__(self) -> "HostShapes":
        with _uncounted():
            super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        with _uncounted():
            super().__exit__(*error)

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor then calls the operator with its local tensors
        if types:
            return operator(*args, **kwargs)
        if operator in (_ATEN.empty_like.default, _ATEN.zeros_like.default) and kwargs.get("device") == _HOST:
            meta = operator(_on_meta(args[0]), **kwargs | {"device": torch.device("meta")})
            return mark_as_placeholders(zeros_on_host(meta.shape, meta.stride(), meta.dtype))
        if operator is _ATEN.zeros.default and kwargs.get("device") == _HOST:
            return zeros_on_host(args[0], contiguous_strides(args[0]), kwargs.get("dtype") or torch.float32)
        found = list(_tensors((*args, *kwargs.values())))
        on_host = all(each.device.type == "cpu" for each in found)
        if operator.is_view or not (on_host and any(each.nbytes >= LARGE_ON_HOST for each in found)):
            return operator(*args, **kwargs)
        with _uncounted():
            return _by_shape(operator, args, kwargs)


@contextmanager
def _uncounted() -> Iterator[None]:
    """Charge the program for none of the Python calls inside: they are the simulator's."""
    python = ACCELERATOR.python
    calls = python.calls
    yield
    python.calls = calls


def _by_shape(operator: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Return what `operator` returns, without reading or writing its tensors."""
    schema = operator._schema
    written = []
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(kwargs.get(argument.name) if argument.kwarg_only else args[place])
    for tensor in _tensors(written):
        mark_as_placeholders(tensor)
    if len(written) >= len(schema.returns):
        return None if not schema.returns else written[0] if len(schema.returns) == 1 else tuple(written)
    positional, named = tree_map_only(torch.Tensor, _on_meta, (args, dict(kwargs)))
    if named.get("device") is not None:
        named["device"] = torch.device("meta")
    return tree_map_only(torch.Tensor, _on_host, operator(*positional, **named))


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among an operator's arguments, also in lists."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _on_host(meta: torch.Tensor) -> torch.Tensor:
    """Return zeros like `meta`: a small result, such as a norm, may be read."""
    return mark_as_placeholders(take_pageable(zeros_on_host(meta.shape, meta.stride(), meta.dtype)))


_PASSES_UNFUSED = 3
"""Factor on memory traffic: AdamW's dozen operators access 21 tensors, the fused kernel 7."""

_STEPPING: list[tuple[torch.optim.Optimizer, HostShapes]] = []
"""Optimizers inside a step on host tensors without values, outermost first."""


def register_host_optimizer() -> None:
    """Add the cost of optimizer steps on offloaded parameters, from now on in this process.

    A step's operators run under `HostShapes`, unless the sanitizer follows them or a closure runs the model.
    Its simulated time is the bytes moved divided by a rank's share of memory bandwidth
    (`host_link.memory_gb_s`):
        parameter and states are read and written, the gradient is read         a fused step
        three times that, because each operator goes through memory again       foreach and loops
    """
    register_optimizer_step_pre_hook(_begin)
    register_optimizer_step_post_hook(_charge)


def _begin(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if _STEPPING and _STEPPING[-1][0] is optimizer:  # its last step raised
        _STEPPING.pop()[1].__exit__(None, None, None)
    if ACCELERATOR.started and ACCELERATOR.sanitizer is None and not (args[1:] or kwargs):
        gradients = (local_tensor(each.grad) for group in optimizer.param_groups for each in group["params"])
        if any(each is not None and has_no_values(each) for each in gradients):
            _STEPPING.append((optimizer, HostShapes()))
            _STEPPING[-1][1].__enter__()


def _charge(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if _STEPPING and _STEPPING[-1][0] is optimizer:
        _STEPPING.pop()[1].__exit__(None, None, None)
    if not ACCELERATOR.started:
        return
    if ACCELERATOR.sanitizer is not None:
        ACCELERATOR.sanitizer.step_ended(optimizer)
    nbytes = 0
    for group in optimizer.param_groups:
        passes = 1 if group.get("fused") else _PASSES_UNFUSED
        for parameter in group["params"]:
            if parameter.grad is not None and local_tensor(parameter).device.type == "cpu":
                nbytes += passes * _bytes_of_step(parameter, optimizer.state[parameter])
    took_ns = round(nbytes * ACCELERATOR.host_ns_per_byte)
    ACCELERATOR.timeline.cpu += took_ns
    ACCELERATOR.host_optimizer_ns += took_ns


def _bytes_of_step(parameter: torch.Tensor, state: Mapping[str, object]) -> int:
    """Return the bytes that one pass over one parameter reads and writes."""
    local, gradient = local_tensor(parameter), local_tensor(parameter.grad)
    states = [local_tensor(value) for value in state.values() if isinstance(value, torch.Tensor)]
    kept = sum(tensor.nbytes for tensor in states if tensor.shape == local.shape)
    return 2 * (local.nbytes + kept) + gradient.nbytes


def local_tensor(tensor: Any) -> torch.Tensor:
    """Return a DTensor's local part, or any other tensor unchanged."""
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return part
