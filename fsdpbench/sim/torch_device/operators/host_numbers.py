"""Whole numbers that came from the host stay known: operators on them are computed on the host beside.

labels.masked_fill(mask == 0, -100) != -100        a mask whose count is known: x[mask] has a length
counts.cumsum(0), pad(counts), cat([zero, ends])   offsets, also of a router's balanced counts
labels[:, 5:] = ids[:, 5:], labels.fill_(0)        written in place, also through a view
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fsdpbench.sim.torch_device.operators.choices import choice_of, mark, placed, whole_numbers
from fsdpbench.sim.torch_device.tensors import Listed, is_on_device, record_of

_COMPUTED = {
    "sum", "count_nonzero", "any", "all", "cumsum", "clone", "roll", "_to_copy", "max", "min", "amax", "amin",
    "copy_", "cat", "stack", "constant_pad_nd", "index", "index_select", "gather", "flip", "repeat", "sort",
    "argmax", "index_put_", "scatter_", "floor_divide", "fill_", "zero_", "one_hot", "tril", "triu",
}  # fmt: skip
"""Operators beside the pointwise ones."""
_UNLIKE = {"cumsum", "cat", "constant_pad_nd"}
"""Operators that make different numbers of equal ones."""


def computed(
    operator: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    taken: Sequence[torch.Tensor],
    written: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
) -> bool:
    """Keep the numbers of an operator's results, if those of its tensors are known; return whether."""
    name = operator._schema.name.removeprefix("aten::")
    if torch.Tag.pointwise not in operator.tags and name not in _COMPUTED:
        return False
    if name not in _UNLIKE and not any(isinstance(choice_of(each), Listed) for each in taken):
        return False
    stores: dict[int, torch.Tensor] = {}
    for tensor in taken:
        record = record_of(tensor.untyped_storage())
        is_filled = name == "copy_" and args[0] is tensor is not args[1]
        is_filled = is_filled and record is not None and record.nbytes == tensor.nbytes
        numbers = torch.zeros(tensor.shape, dtype=tensor.dtype) if is_filled else whole_numbers(tensor)
        if numbers is None or tensor.is_floating_point() or tensor.is_complex():
            return False
        stores[id(tensor.untyped_storage())] = numbers.clone() if written else numbers

    def twin(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [twin(each) for each in value]
        if isinstance(value, torch.Tensor) and is_on_device(value):
            return placed(stores[id(value.untyped_storage())], value)
        return torch.device("cpu") if isinstance(value, torch.device) else value

    try:
        found = operator(*map(twin, args), **{key: twin(value) for key, value in kwargs.items()})
    except (RuntimeError, TypeError, IndexError, NotImplementedError):
        return False
    if written:
        for each in written:
            mark(each, Listed(stores[id(each.untyped_storage())]))
        return True
    values = found if isinstance(found, (list, tuple)) else [found]
    return min(_keep(result, value) for result, value in zip(results, values, strict=True))


def _keep(result: torch.Tensor, value: torch.Tensor) -> bool:
    """Keep a result's numbers, if they fill its storage in the same order."""
    record = record_of(result.untyped_storage())
    storage = value.untyped_storage()
    alike = result.dtype == value.dtype and result.shape == value.shape and result.stride() == value.stride()
    if record is None or not alike or value.is_floating_point() or storage.nbytes() != record.nbytes:
        return False
    mark(result, Listed(value.new_empty(0).set_(storage)))
    return True
