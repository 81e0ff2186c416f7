"""A call of an operator, and what it costs. Everything here sees meta tensors: shapes, strides and dtypes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fsdpbench.sim.costs import KernelCosts


class Call(NamedTuple):
    """One call that ran on meta tensors: the operator's overload, its arguments, what came out."""

    func: Any
    args: Sequence[Any]
    kwargs: dict[str, Any]
    outs: Sequence[torch.Tensor]


@dataclass(frozen=True)
class OperatorCost:
    """Price of one call: kernel name, nanoseconds, scratch memory in bytes, and whether it is a guess.
    ``nbytes``: read and written, of what memory limits; 0 for products and attention."""

    kernel: str
    duration_ns: int
    workspace_bytes: tuple[int, ...] = ()
    unknown: bool = False
    nbytes: int = 0


Price = Callable[[Call, KernelCosts], OperatorCost]
FREE = OperatorCost("", 0)


def argument(call: Call, index: int, name: str, default: Any) -> Any:
    """An argument given by position or by name."""
    if index < len(call.args):
        return call.args[index]
    return call.kwargs.get(name, default)


def operator_name(func: Any) -> str:
    """An operator's name without its namespace: `addmm` of `aten::addmm.out`."""
    return str(func._schema.name.split("::", 1)[1])


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Bytes that a tensor's distinct elements occupy: expanded (stride 0) dimensions count once."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride != 0 or size == 0:
            elements *= size
    return elements * tensor.element_size()
