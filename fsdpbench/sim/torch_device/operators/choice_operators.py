"""Operators that make a router's choices, and those whose result's length is a mask's count.

Each kernel is called as those of `special_operators.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fsdpbench.sim.torch_device.accelerator import ACCELERATOR
from fsdpbench.sim.torch_device.operators.choices import choice_of, mark, numbers_in, placed, rows_of
from fsdpbench.sim.torch_device.operators.known_values import Number, known_of
from fsdpbench.sim.torch_device.operators.plans import NEW, Plan, carry_out, data_dependent
from fsdpbench.sim.torch_device.prices.products import OperatorCost, tensor_bytes
from fsdpbench.sim.torch_device.strict.words import bind
from fsdpbench.sim.torch_device.tensors import Chosen, Listed, Share, is_on_device

Kernel = Callable[..., Any]
_COUNT_BYTES = 8
_INDEX = torch.int64


def ranked(operator: Any, by_shape: Kernel, scores: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Run `topk`, `sort`, `argmax` or `max` over a dimension: the indices are choices among its elements."""
    result = by_shape(scores, *args, **kwargs)
    if not ACCELERATOR.follows_numbers or scores.dim() < 2 or choice_of(scores) is not None:
        return result
    indices = result[1] if isinstance(result, (list, tuple)) else result
    dim = bind(operator, (scores, *args), kwargs).get("dim")
    if isinstance(dim, int) and indices.dtype is _INDEX and indices.dim() >= scores.dim() - 1:
        mark(indices, Chosen(scores.shape[dim]))
    return result


def nonzero(operator: Any, by_shape: Kernel, mask: torch.Tensor) -> torch.Tensor:
    """Run `nonzero`, also of `torch.where(mask)`: the CPU waits for a count, then positions are written."""
    rows = rows_of(mask)
    if rows is None:
        raise data_dependent(operator)
    known = choice_of(mask)
    if ACCELERATOR.on_value is not None and isinstance(known, Share):
        ACCELERATOR.on_value("torch.nonzero", f"balanced: {rows} of {mask.numel()}", False)
    count = torch.count_nonzero(mask)
    ACCELERATOR.copy_over_host_link("DtoH", _COUNT_BYTES, blocking=True, device=count)
    nbytes = rows * mask.dim() * _INDEX.itemsize
    shape, strides = (rows, mask.dim()), (1, rows)  # as on CUDA, an index's column is contiguous
    duration = ACCELERATOR.kernel_costs.memory_bound_ns(tensor_bytes(mask) + nbytes, "reduction")
    plan = Plan("aten::nonzero", [(NEW, shape, strides, _INDEX, nbytes)], False,
                OperatorCost("nonzero_kernel", duration, nbytes=nbytes))  # fmt: skip
    plan.cpu_ns = ACCELERATOR.cpu_costs.operator_ns
    places: torch.Tensor = carry_out(ACCELERATOR, plan, [mask])
    if isinstance(known, Listed):
        mark(places, Listed(placed(known.values, mask).nonzero().t().reshape(-1)))
    elif mask.dim() == 1 and rows == mask.numel():
        mark(places, Listed(torch.arange(rows)))
    return places


def masked_select(operator: Any, by_shape: Kernel, tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Run `masked_select` as `tensor[mask]`."""
    if rows_of(mask) is None:
        raise data_dependent(operator)
    tensor, mask = torch.broadcast_tensors(tensor, mask)
    chosen: torch.Tensor = tensor[mask]
    return chosen


def by_places(indices: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
    """Return the indices of `tensor[indices]` with masks replaced by their positions, as in torch."""
    if not any(_is_mask(index) for index in indices):
        return indices
    found: list[torch.Tensor | None] = []
    for index in indices:
        if index is not None and _is_mask(index) and rows_of(index) is not None:
            found += index.nonzero().unbind(1)
        else:
            found.append(index)
    return found


def _is_mask(index: torch.Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8) and is_on_device(index)


def written_by_places(
    operator: Any, by_shape: Kernel, tensor: torch.Tensor, indices: Sequence[Any], *args: Any, **kwargs: Any
) -> Any:
    """Run `tensor[indices] = values`, or the gradient of `tensor[indices]`."""
    return by_shape(tensor, by_places(indices), *args, **kwargs)


CHOICE_OPERATORS: dict[str, Kernel] = {
    **dict.fromkeys(("topk", "sort", "argmax", "max"), ranked),
    "nonzero": nonzero,
    "masked_select": masked_select,
    **dict.fromkeys(("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"), written_by_places),
}


def placeholder(tensor: torch.Tensor) -> tuple[Number, bool]:
    """Return the value of a tensor with one element, of its dtype; and whether it is true."""
    numbers = numbers_in(tensor) if ACCELERATOR.known_values else None
    if numbers is not None:
        return numbers.item(), True
    known = known_of(tensor) if ACCELERATOR.known_values else None
    if known is not None:
        return known.value.item(), not known.assumed
    return torch.zeros((), dtype=tensor.dtype).item(), False
