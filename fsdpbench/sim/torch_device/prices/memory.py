"""Prices of operators limited by memory, from the bytes that they must read and write."""

import dataclasses
import math
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
from fsdpbench.sim.torch_device.strict.words import bind
from fsdpbench.sim.torch_device.tensors import tensors_in


def moves(
    kind: str,
    size: Callable[[Call], int] | None = None,
    *,
    passes: int = 1,
    reread: bool = False,
    unknown: bool = False,
) -> Price:
    """Return the rule of a kernel that moves `size` bytes, by default all inputs and outputs.

    `kind`: `pointwise`, `reduction`, `copy`, `gather` or `optimizer`, which selects a bandwidth of the
    profile. `passes`: how often all bytes are read and written. `reread`: the first two inputs are read
    twice, because caches do not hold them between two passes. `unknown`: the price is a guess.
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
    """Return whether torch passes a copy to the driver: one dtype, both sides contiguous."""
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
    """Return the bytes of all inputs and outputs; inputs that the schema declares written count twice."""
    func, args, kwargs, outs = call
    inputs = tensors_in(args, kwargs if hasattr(func._schema, "arguments") else {})
    known = {id(tensor) for tensor in inputs}
    total = sum(map(tensor_bytes, inputs)) + sum(tensor_bytes(out) for out in outs if id(out) not in known)
    arguments = getattr(func._schema, "arguments", ())  # a Triton kernel has none
    for index, each in enumerate(arguments):
        if each.alias_info is None or not each.alias_info.is_write:
            continue
        value = args[index] if index < len(args) else kwargs.get(each.name)
        if each.name != "out" and operator_name(func) not in _WRITE_ONLY:  # these are counted once
            total += sum(map(tensor_bytes, tensors_in((value,), {})))
    return total


_WRITE_ONLY = {
    "copy_", "_copy_from", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_", "normal_", "uniform_",
    "random_",
}  # fmt: skip


_BLOCK_FROM = 128
# Adding rows, sorted or by atomic additions, takes as long as this many passes over their bytes (one H200).
_ADDING = 16


def rows_read(call: Call) -> int:
    """Return the bytes of a look-up: it reads as many rows as it writes, and its indices."""
    others = tensors_in(call.args, {})[1:]
    indices = [tensor for tensor in others if not tensor.is_floating_point()]
    row = call.outs[0].shape[-1] * call.outs[0].element_size() if call.outs and call.outs[0].dim() > 1 else 0
    # Each row has a block, which takes as long as moving 2.3 kB (one H200).
    blocks = whole_output(call) // row * 2300 if row >= _BLOCK_FROM else 0
    return max(2 * whole_output(call), blocks) + sum(map(tensor_bytes, indices))


def rows_added(call: Call) -> int:
    """Return the bytes of a look-up's dense gradient: zeroed once, then rows are added."""
    return whole_output(call) + _ADDING * tensor_bytes(call.args[0])


def bags_read(call: Call) -> int:
    """Return the bytes of reading and summing bags of rows: one row per index, and the sums."""
    table, indices = call.args[:2]
    return int(indices.numel()) * table.shape[-1] * table.element_size() + whole_output(call)


def bags_added(call: Call) -> int:
    """Return the bytes of a table's gradient: zeroed once, then each index adds the row of its bag."""
    grad, indices = call.args[:2]
    return 3 * int(indices.numel()) * grad.shape[-1] * grad.element_size() + whole_output(call)


def rows_written(call: Call) -> int:
    """Return the bytes of writing rows in place: values are read, targets are read and written."""
    tensors = tensors_in(call.args, {})[1:]
    adds = "add" in operator_name(call.func) or bind(call.func, call.args, call.kwargs).get("accumulate")
    passes = _ADDING if adds else 3
    return passes * max((tensor_bytes(t) for t in tensors if t.is_floating_point()), default=0) + sum(
        tensor_bytes(t) for t in tensors if not t.is_floating_point()
    )


def rows_filled(call: Call) -> int:
    """Return the bytes of filling rows of a dimension with a number, and of reading the indices."""
    target, dim, index = call.args[0], argument(call, 1, "dim", 0), argument(call, 2, "index", None)
    rows = tensor_bytes(target) // max(1, target.shape[dim] if target.dim() else 1)
    return rows * int(index.numel()) + tensor_bytes(index)


def copied_rows_filled(call: Call) -> int:
    """Return the bytes of copying the tensor and filling rows of the copy."""
    return 2 * whole_output(call) + rows_filled(call)


def each_dimension(call: Call) -> int:
    """Return the bytes of a Fourier transform: all bytes, once per transformed dimension."""
    return bytes_moved(call) * max(1, len(argument(call, 1, "dim", ())))


def copied_rows_written(call: Call) -> int:
    """Return the bytes of copying the tensor and writing rows into the copy."""
    return 2 * whole_output(call) + rows_written(call)


def chosen_entries(call: Call) -> int:
    """Return the bytes of a classification loss, which reads one entry per row."""
    return 2 * tensor_bytes(call.args[1]) + whole_output(call)


def whole_output(call: Call) -> int:
    """Return the bytes of all outputs."""
    return sum(map(tensor_bytes, call.outs))


# Instruction counts of operators whose addresses cost more than their bytes: broadcast operands, and sums
# over few elements (`elementwise`, `reduction`). Counted in the machine code that nvcc and ptxas 12 generate
# from the sources of torch 2.2 and 2.13 (equal here) for compute capability 8.0 and 9.0.

# Per dimension: a division by a constant, the remainder, the loop test; plus one multiply-add per tensor.
_A_DIMENSION = 7
# Per element: loads, 64-bit addresses, the operation and the store.
_AN_ELEMENT = 14
# Because instructions wait for each other, they take 1.4 to 2.1 times as long (one H200,
# ci/measured/gpu/h200). For tensors of several dtypes, a switch over dtypes converts each.
_WAITING = 1.87
_CONVERTING, _A_CONVERSION = 16, 6
# A thread of a reduction, without its addresses, which it computes twice.
_A_REDUCTION = 113
_A_SHUFFLE, _A_VALUE = 5, 5
_WARP = 32
_VECTORISED_FROM, _VECTOR = 128, 4

Strides = tuple[int, ...]


def elementwise(call: Call, costs: KernelCosts) -> OperatorCost:
    """Price one operation per element by bytes or by addresses, whichever takes longer.

    torch iterates over an operator's tensors in one order of dimensions and merges those that are adjacent in
    all tensors. Each remaining one costs a division, and a product per tensor (OffsetCalculator.cuh). A
    kernel over five dimensions, e.g. rotary embeddings by matrices, is limited by instructions, not by bytes.
    """
    found, operands = _POINTWISE(call, costs), _broadcast(call)
    if operands is None:
        return found
    given = [each for each in tensors_in(call.args, call.kwargs) if each.dim()]
    converts = len({each.dtype for each in given if each.is_floating_point()}) > 1
    elements, tensors = call.outs[0].numel(), len(operands[1])
    return at_least(found, _addressed(elements, _joined(*operands), tensors, converts, costs))


def copied(call: Call, costs: KernelCosts) -> OperatorCost:
    """Price a copy by bytes or by addresses, as in `elementwise`; `cat` of contiguous tensors by bytes."""
    found, out = _COPY(call, costs), call.outs[0]
    given = [each for each in tensors_in(call.args, {}) if each.dim()] or [out]
    if operator_name(call.func) in ("cat", "stack"):
        dimensions = 0 if all(each.is_contiguous() for each in given) else out.dim()
        return at_least(found, _addressed(out.numel(), dimensions, 3, False, costs))
    source, target = (given[-1], given[0]) if len(given) > 1 else (given[0], out)
    dimensions = _joined(target.shape, [target.stride(), source.expand(target.shape).stride()])
    # Conversion from float32 to 16 bits has a separate kernel.
    converts = source.dtype is not target.dtype and source.dtype is not torch.float32
    return at_least(found, _addressed(target.numel(), dimensions, 2, converts, costs))


def _addressed(elements: int, dimensions: int, tensors: int, converts: bool, costs: KernelCosts) -> int:
    """Return ns to issue one operation per element; 0 if the kernel loads vectors."""
    if dimensions < 2 and not converts:
        return 0
    issued = _AN_ELEMENT + converts * (_CONVERTING + tensors * _A_CONVERSION)
    issued += dimensions * (_A_DIMENSION + tensors) if dimensions > 1 else 0
    return costs.issued_ns(elements, issued * _WAITING)


def reduction(call: Call, costs: KernelCosts) -> OperatorCost:
    """Price sums over some dimensions by bytes or by threads, whichever takes longer.

    A reduction gives each result at least one thread, up to a warp if it has enough elements (Reduce.cuh,
    setReduceConfig). A thread issues over a hundred instructions, for two elements or for two hundred.
    """
    found = _REDUCTION(call, costs)
    threads, issued = _of_reduction(call)
    return at_least(found, costs.issued_ns(threads, issued)) if threads else found


_POINTWISE, _REDUCTION, _COPY = moves("pointwise"), moves("reduction"), moves("copy")


def at_least(found: OperatorCost, issued_ns: int) -> OperatorCost:
    """Return `found`, with the time to issue its instructions if that is longer."""
    if issued_ns <= found.duration_ns:
        return found
    return dataclasses.replace(found, duration_ns=issued_ns)


def _broadcast(call: Call) -> tuple[Sequence[int], list[Strides]] | None:
    """Return the result's shape and the strides of all tensors expanded to it, the result's first.

    Return None if the call is not one operation per element.
    """
    if len(call.outs) != 1:
        return None
    out = call.outs[0]
    given = [each for each in tensors_in(call.args, call.kwargs) if each is not out and each.dim()]
    try:
        return out.shape, [out.stride(), *(each.expand(out.shape).stride() for each in given)]
    except RuntimeError:
        return None


def _joined(shape: Sequence[int], operands: Sequence[Strides]) -> int:
    """Return the number of dimensions after merging those that are adjacent in all operands."""
    dims = sorted(
        (tuple(strides[i] for strides in operands), size) for i, size in enumerate(shape) if size > 1
    )
    left = 0
    behind: tuple[int, ...] | None = None
    for strides, size in dims:
        left += strides != behind
        behind = tuple(stride * size for stride in strides)
    return left


def _of_reduction(call: Call) -> tuple[float, float]:
    """Return the threads of a reduction and the instructions of each; (0, 0) for a single result."""
    x, out = call.args[0], call.outs[0]
    if not isinstance(x, torch.Tensor) or out.numel() < 2 or x.numel() <= out.numel():
        return 0, 0
    reduced = _reduced_dimensions(call, x)
    kept = [i for i in range(x.dim()) if i not in reduced and x.shape[i] > 1]
    gone = [i for i in reduced if x.shape[i] > 1]
    strides = list(out.stride())
    if out.dim() == x.dim():
        into = {i: strides[i] for i in kept}
    else:
        into = dict(zip((i for i in range(x.dim()) if i not in reduced), strides, strict=True))
    operands = [tuple(into[i] for i in kept), tuple(x.stride(i) for i in kept)]
    dimensions = _joined([x.shape[i] for i in kept], operands)
    each = x.numel() / out.numel()
    along = min(x.stride(i) for i in gone)
    if along < min(x.stride(i) for i in kept):
        vectorised = each >= _VECTORISED_FROM and along == 1 and len(gone) == 1
        width = min(2 ** int(math.log2(each / (_VECTOR if vectorised else 1))), _WARP)
        threads = out.numel() * width
        values = each / width / (_VECTOR if vectorised else 1)
        shuffles = math.log2(width)
    else:
        threads, values, shuffles = out.numel() / _VECTOR, each, 0
    issued = _A_REDUCTION + 2 * dimensions * (_A_DIMENSION + 1) + shuffles * _A_SHUFFLE
    return threads, issued + (values - 1) * _A_VALUE


def _reduced_dimensions(call: Call, x: torch.Tensor) -> set[int]:
    """Return the dimensions in the call's `dim`, or all dimensions without it."""
    given = bind(call.func, call.args, call.kwargs).get("dim")
    if given is None or given == []:
        return set(range(x.dim()))
    return {int(i) % x.dim() for i in (given if isinstance(given, (list, tuple)) else [given])}
