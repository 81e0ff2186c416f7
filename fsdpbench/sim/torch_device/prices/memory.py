"""Operators limited by memory: priced by the bytes that they must read and write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fsdpbench.sim.model.kernel_costs import KernelCosts
from fsdpbench.sim.torch_device.prices.products import (
    Call,
    OperatorCost,
    Price,
    argument,
    operator_name,
    tensor_bytes,
)
from fsdpbench.sim.torch_device.tensors import tensors_in


def moves(
    kind: str,
    size: Callable[[Call], int] | None = None,
    *,
    passes: int = 1,
    reread: bool = False,
    unknown: bool = False,
) -> Price:
    """A kernel that moves `size` bytes, by default all inputs and outputs.

    Args:
        kind: `pointwise`, `reduction`, `copy`, `gather` or `optimizer`: which bandwidth of the profile.
        passes: how often all of it is read and written.
        reread: the first two inputs are read twice: they do not fit the caches between two passes.
        unknown: the price is a guess.
    """
    count = bytes_moved if size is None else size

    def price(call: Call, costs: KernelCosts) -> OperatorCost:
        name = operator_name(call.func)
        nbytes = count(call) * passes
        if reread:
            nbytes += sum(map(tensor_bytes, tensors_in(call.args[:2], {})))
        found = "memcpy" if _is_plain_copy(name, call.args, call.outs) else kind
        return OperatorCost(
            name.strip("_") + "_kernel", costs.memory_bound_ns(nbytes, found), unknown=unknown, nbytes=nbytes
        )

    return price


def _is_plain_copy(name: str, args: Sequence[Any], outs: Sequence[torch.Tensor]) -> bool:
    """Whether torch leaves a copy to the driver: one dtype, both sides contiguous."""
    if name not in ("clone", "copy_", "_copy_from"):
        return False
    sides = [*tensors_in(args, {}), *outs][:2] if name == "clone" else tensors_in(args, {})[:2]
    return (
        len(sides) == 2
        and sides[0].dtype is sides[1].dtype
        and sides[0].shape == sides[1].shape
        and all(side.is_contiguous() for side in sides)
    )


def bytes_moved(call: Call) -> int:
    """Bytes read and written: all inputs, all outputs, and the inputs that the schema says are written."""
    func, args, kwargs, outs = call
    inputs = tensors_in(args, kwargs)
    known = {id(tensor) for tensor in inputs}
    total = sum(map(tensor_bytes, inputs)) + sum(tensor_bytes(out) for out in outs if id(out) not in known)
    arguments = func._schema.arguments
    for index, each in enumerate(arguments):
        if each.alias_info is None or not each.alias_info.is_write:
            continue
        value = args[index] if index < len(args) else kwargs.get(each.name)
        written = tensors_in((value,), {})
        size = sum(map(tensor_bytes, written))
        total += size if not _only_written(func, each.name) else 0
    return total


_WRITE_ONLY = {
    "copy_",
    "_copy_from",
    "fill_",
    "zero_",
    "_foreach_copy_",
    "_foreach_zero_",
    "normal_",
    "uniform_",
    "random_",
}


def _only_written(func: Any, argument: str) -> bool:
    """Whether an output argument is written without being read (counted once then)."""
    return argument == "out" or operator_name(func) in _WRITE_ONLY


# ------------------------------------------------------------- not by all of their inputs


def rows_read(call: Call) -> int:
    """A look-up reads as many rows as it writes, and its indices."""
    args, outs = call.args, call.outs
    return 2 * sum(map(tensor_bytes, outs)) + sum(
        tensor_bytes(tensor) for tensor in tensors_in(args, {})[1:] if not tensor.is_floating_point()
    )


def rows_added(call: Call) -> int:
    """A dense gradient of a look-up: zeroed once, and for each row a read of it and of what is added."""
    args, outs = call.args, call.outs
    return sum(map(tensor_bytes, outs)) + 3 * tensor_bytes(args[0])


def bags_read(call: Call) -> int:
    """Bags of rows read and summed: a row an index, and the sums."""
    args, outs = call.args, call.outs
    table, indices = args[0], args[1]
    return indices.numel() * table.shape[-1] * table.element_size() + sum(map(tensor_bytes, outs))


def bags_added(call: Call) -> int:
    """The gradient of a table (zeroed once): for each index a row of the bag's gradient is read and added."""
    args, outs = call.args, call.outs
    grad, indices = args[0], args[1]
    return 3 * indices.numel() * grad.shape[-1] * grad.element_size() + sum(map(tensor_bytes, outs))


def rows_written(call: Call) -> int:
    """Writing rows in place: the values are read, their places read and written."""
    args = call.args
    tensors = tensors_in(args, {})[1:]
    return 3 * max((tensor_bytes(t) for t in tensors if t.is_floating_point()), default=0) + sum(
        tensor_bytes(t) for t in tensors if not t.is_floating_point()
    )


def rows_filled(call: Call) -> int:
    """A number is written to rows of a dimension: those rows alone, and the indices are read."""
    target, dim, index = call.args[0], argument(call, 1, "dim", 0), argument(call, 2, "index", None)
    rows = tensor_bytes(target) // max(1, target.shape[dim] if target.dim() else 1)
    return rows * int(index.numel()) + tensor_bytes(index)


def copied_rows_filled(call: Call) -> int:
    """The same in a copy."""
    return 2 * sum(map(tensor_bytes, call.outs)) + rows_filled(call)


def each_dimension(call: Call) -> int:
    """A Fourier transform reads and writes everything once for each dimension that it transforms."""
    return bytes_moved(call) * max(1, len(argument(call, 1, "dim", ())))


def copied_rows_written(call: Call) -> int:
    """Writing rows into a copy: the tensor is read and written, and then as in place."""
    return 2 * sum(map(tensor_bytes, call.outs)) + rows_written(call)


def chosen_entries(call: Call) -> int:
    """The loss of a classification reads one entry a row."""
    args, outs = call.args, call.outs
    return 2 * tensor_bytes(args[1]) + sum(map(tensor_bytes, outs))


def whole_output(call: Call) -> int:
    """The output is zeroed, and a few entries are written."""
    return sum(map(tensor_bytes, call.outs))
