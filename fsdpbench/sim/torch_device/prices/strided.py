"""Operators whose addresses cost more than their bytes: broadcast operands, and sums over a few elements.

torch walks an operator's tensors in one order of dimensions and joins those that follow each other in all of
them. Along what is left, each dimension costs a division and a product a tensor (OffsetCalculator.cuh): a
kernel over five dimensions, as rotary positions by matrices have, issues more than it moves. A reduction
gives each result at least one thread, as many as it has elements up to a warp (Reduce.cuh, setReduceConfig);
such a thread issues over a hundred instructions whether it adds two elements or two hundred.

Counts are of torch 2.2's and 2.13's sources (they are alike here), in the machine code that nvcc and ptxas 12
make of them for compute capability 8.0 and 9.0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from fsdpbench.sim.model.kernel_costs import KernelCosts
from fsdpbench.sim.torch_device.prices.memory import moves
from fsdpbench.sim.torch_device.prices.products import Call, OperatorCost, Price
from fsdpbench.sim.torch_device.tensors import tensors_in

# A division by a constant, the rest, the loop's test; then one multiply-add for each tensor.
_A_DIMENSION = 7
# Loads, 64-bit addresses, the operation and the store of an element.
_AN_ELEMENT = 14
# A thread of a reduction without its addresses, which it computes twice.
_A_REDUCTION = 113
_A_SHUFFLE, _A_VALUE = 5, 5
_WARP = 32
_VECTORISED_FROM, _VECTOR = 128, 4

Strides = tuple[int, ...]


def elementwise(kind: str) -> Price:
    """An element at a time, by bytes or by addresses, whichever takes longer."""
    by_bytes = moves(kind)

    def price(call: Call, costs: KernelCosts) -> OperatorCost:
        found = by_bytes(call, costs)
        operands = _broadcast(call)
        dimensions = _joined(*operands) if operands is not None else 0
        if operands is None or dimensions < 2:  # one dimension is loaded in vectors
            return found
        issued = _AN_ELEMENT + dimensions * (_A_DIMENSION + len(operands[1]))
        return _at_least(found, costs.issued_ns(call.outs[0].numel(), issued))

    return price


def reduction(kind: str) -> Price:
    """Sums and the like over some dimensions, by bytes or by threads, whichever takes longer."""
    by_bytes = moves(kind)

    def price(call: Call, costs: KernelCosts) -> OperatorCost:
        found = by_bytes(call, costs)
        threads, issued = _of_reduction(call)
        return _at_least(found, costs.issued_ns(threads, issued)) if threads else found

    return price


def _at_least(found: OperatorCost, issued_ns: int) -> OperatorCost:
    if issued_ns <= found.duration_ns:
        return found
    return OperatorCost(found.kernel, issued_ns, found.workspace_bytes, found.unknown, found.nbytes)


def _broadcast(call: Call) -> tuple[Sequence[int], list[Strides]] | None:
    """The result's shape and the strides of all tensors expanded to it, the result's first; None where the
    call is something else than one operation an element."""
    if len(call.outs) != 1:
        return None
    out = call.outs[0]
    given = [each for each in tensors_in(call.args, call.kwargs) if each is not out and each.dim()]
    try:
        return out.shape, [out.stride(), *(each.expand(out.shape).stride() for each in given)]
    except RuntimeError:
        return None


def _joined(shape: Sequence[int], operands: Sequence[Strides]) -> int:
    """How many dimensions are left where those that follow each other in all operands are one."""
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
    """Threads of a reduction, and what each issues; (0, 0) where all becomes one element."""
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
    """Those that the call's `dim` names, all without one."""
    names = [argument.name for argument in call.func._schema.arguments]
    given = call.kwargs.get("dim")
    if "dim" in names and names.index("dim") < len(call.args):
        given = call.args[names.index("dim")]
    if given is None or given == []:
        return set(range(x.dim()))
    return {int(i) % x.dim() for i in (given if isinstance(given, (list, tuple)) else [given])}
