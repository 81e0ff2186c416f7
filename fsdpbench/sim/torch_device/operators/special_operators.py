"""Operators that need more than shapes: they move data between device and host, set storages, make a router's
choices, or have results whose length is the count of a mask.

The device has no data. Reads by Python (`.item()`, `.cpu()`, `.tolist()`) wait for the device, as on a GPU,
and return zeros. Comparisons of whole tensors report that they are equal.

Each function's arguments are the operator, the kernel that follows from shapes alone, and the call's own
arguments.
"""

from collections.abc import Callable, Sequence
from math import isinf, prod
from typing import Any

import torch

from fsdpbench.base.files.documents import table_beside
from fsdpbench.base.torch_internals import current_graph_task_id
from fsdpbench.sim.torch_device import tensors
from fsdpbench.sim.torch_device.accelerator import ACCELERATOR
from fsdpbench.sim.torch_device.operators import choices, known_values
from fsdpbench.sim.torch_device.operators.plans import NEW, Plan, carry_out, data_dependent
from fsdpbench.sim.torch_device.prices.products import OperatorCost, tensor_bytes
from fsdpbench.sim.torch_device.strict import refuse_what_cuda_refuses
from fsdpbench.sim.torch_device.strict.shapes import on_host_resolved
from fsdpbench.sim.torch_device.strict.words import bind
from fsdpbench.sim.torch_device.tensors import Chosen, Listed, Share, is_on_device

_SMALL = 1 << 16
"""Maximum elements of a host tensor to fill with placeholders; larger ones are only marked."""
LIKE = table_beside(__file__, "names.toml")["special_operators"]["like"]
Kernel = Callable[..., Any]
_COUNT_BYTES = 8
_INDEX = torch.int64


def ranked(operator: Any, by_shape: Kernel, scores: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Run `topk`, `sort`, `argmax`, `max` or `multinomial`: the indices become choices along a dimension."""
    result = by_shape(scores, *args, **kwargs)
    indices = result[1] if isinstance(result, (list, tuple)) else result
    unknown = choices.choice_of(scores) is None and choices.choice_of(indices) is None
    if not ACCELERATOR.follows_numbers or scores.dim() < 2 or not unknown:
        return result
    dim = bind(operator, (scores, *args), kwargs).get("dim", -1)
    if isinstance(dim, int) and indices.dtype is _INDEX and indices.dim() >= scores.dim() - 1:
        choices.mark(indices, Chosen(scores.shape[dim]))
    return result


def nonzero(operator: Any, by_shape: Kernel, mask: torch.Tensor) -> torch.Tensor:
    """Run `nonzero` (also for `torch.where(mask)`): the CPU waits for a count, then positions are written."""
    rows, filled = choices.rows_of(mask), known_values.known_of(mask)
    if (
        rows is None and filled is not None and current_graph_task_id() != -1
    ):  # in torch's own backward of `prod`
        rows = mask.numel() * bool(filled.value)
    if rows is None:
        raise data_dependent(operator)
    known = choices.choice_of(mask)
    assumed = choices.assumed_of(mask)
    if isinstance(known, Share) or assumed:
        reason = "balanced" if isinstance(known, Share) else "assumed"
        ACCELERATOR.guess("torch.nonzero", f"{reason}: {rows} of {mask.numel()}")
    count = torch.count_nonzero(mask)
    ACCELERATOR.copy_over_host_link("DtoH", _COUNT_BYTES, blocking=True, device=count)
    nbytes = rows * mask.dim() * _INDEX.itemsize
    shape, strides = (rows, mask.dim()), (1, rows)  # as on CUDA, the column of one dimension is contiguous
    duration = ACCELERATOR.kernel_costs.memory_bound_ns(tensor_bytes(mask) + nbytes, "reduction")
    plan = Plan("aten::nonzero", [(NEW, shape, strides, _INDEX, nbytes)], False,
                OperatorCost("nonzero_kernel", duration, nbytes=nbytes))  # fmt: skip
    plan.cpu_ns = ACCELERATOR.cpu_costs.operator_ns
    places: torch.Tensor = carry_out(ACCELERATOR, plan, [mask])
    if isinstance(known, Listed):
        choices.mark(places, Listed(choices.placed(known.values, mask).nonzero().t().reshape(-1), assumed))
    elif mask.dim() == 1 and rows in (0, mask.numel()):
        choices.mark(places, Listed(torch.arange(rows), assumed))
    return places


def distinct(operator: Any, by_shape: Kernel, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Run `unique` or similar on known whole numbers: they are sorted, and the CPU waits."""
    numbers, assumed = choices.whole_numbers(tensor), choices.assumed_of(tensor)
    if numbers is None:
        raise data_dependent(operator)
    given = bind(operator, (tensor, *args), kwargs)
    if "sorted" in given:
        given["sorted"] = True  # on a GPU results are always sorted
    found = operator(*(given | {"self": choices.placed(numbers, tensor)}).values())
    if assumed:
        ACCELERATOR.guess("torch.unique", f"assumed: {len(found[0])} of {tensor.numel()}")
    ordered = tensor.reshape(-1).sort().values
    ACCELERATOR.copy_over_host_link("DtoH", _COUNT_BYTES, blocking=True, device=ordered)
    outputs = [(NEW, tuple(each.shape), None, each.dtype, each.nbytes) for each in found]
    nbytes = tensor_bytes(tensor) + sum(each.nbytes for each in found)
    duration = ACCELERATOR.kernel_costs.memory_bound_ns(nbytes, "reduction")
    plan = Plan(operator._schema.name, outputs, tuple, OperatorCost("unique_kernel", duration, nbytes=nbytes))
    plan.cpu_ns = ACCELERATOR.cpu_costs.operator_ns
    results = carry_out(ACCELERATOR, plan, [ordered])
    for result, part in zip(results, found, strict=True):
        choices.mark(result, Listed(part.reshape(-1).contiguous(), assumed))
    return results


def masked_select(operator: Any, by_shape: Kernel, tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Run `masked_select` like `tensor[mask]`."""
    if choices.rows_of(mask) is None:
        raise data_dependent(operator)
    tensor, mask = torch.broadcast_tensors(tensor, mask)
    chosen: torch.Tensor = tensor[mask]
    return chosen


def by_places(indices: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
    """Return the indices of `tensor[indices]`, with masks replaced by positions as in torch."""
    if not any(_is_mask(index) for index in indices):
        return indices
    found: list[torch.Tensor | None] = []
    for index in indices:
        if index is not None and _is_mask(index) and choices.rows_of(index) is not None:
            found += index.nonzero().unbind(1)
        else:
            found.append(index)
    return found


def _is_mask(index: torch.Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8) and is_on_device(index)


def written_by_places(
    operator: Any, by_shape: Kernel, tensor: torch.Tensor, indices: Sequence[Any], *args: Any, **kwargs: Any
) -> Any:
    """Run `tensor[indices] = values` or the gradient of `tensor[indices]`; no positions: do nothing."""
    places = by_places(indices)
    is_empty = any(each is not None and not each.numel() for each in places)
    if is_empty and operator._schema.name.endswith("put_"):
        return tensor
    return by_shape(tensor, places, *args, **kwargs)


_UNIQUE = "_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"

CHOICE_OPERATORS: dict[str, Kernel] = {
    **dict.fromkeys(("topk", "sort", "argmax", "max", "multinomial"), ranked),
    "nonzero": nonzero,
    "masked_select": masked_select,
    **dict.fromkeys(_UNIQUE, distinct),
    **dict.fromkeys(("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"), written_by_places),
}


def placeholder(tensor: torch.Tensor) -> tuple[known_values.Number, bool]:
    """Return a one-element tensor's value in its dtype, and whether the value is true."""
    host = torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
    is_true = not _is_guess(host, tensor)
    return host.item(), is_true


def _item(operator: Any, by_shape: Kernel, tensor: torch.Tensor) -> float | int | bool | complex:
    """Run `_local_scalar_dense`: wait for the device and return a placeholder."""
    ACCELERATOR.copy_over_host_link("DtoH", tensor.element_size(), blocking=True, device=tensor)
    value, is_true = placeholder(tensor)
    if ACCELERATOR.on_value is not None:
        ACCELERATOR.on_value("item", value, is_true)
    return value


def _equal(
    operator: Any, by_shape: Kernel, first: torch.Tensor, second: torch.Tensor, *args: Any, **kwargs: Any
) -> bool:
    """Run `equal` or `allclose`: a reduction, a copy to the host, and the answer that shapes allow."""
    name = operator._schema.name.removeprefix("aten::")
    if (first.device, first.dtype, first.shape) != (second.device, second.dtype, second.shape):
        refuse_what_cuda_refuses(operator, (first, second), {})
    if ACCELERATOR.sanitizer is not None:
        ACCELERATOR.sanitizer.host_copy(ACCELERATOR.stream, "DtoH", second, None, blocking=True)
    ACCELERATOR.copy_over_host_link("DtoH", 1, blocking=True, device=first)
    same = not ACCELERATOR.trusts_windows and (name == "allclose" or first.shape == second.shape)
    if ACCELERATOR.on_value is not None:
        ACCELERATOR.on_value(f"torch.{name}", same, not same)
    return same


def _all_valid(operator: Any, by_shape: Kernel, tensor: torch.Tensor) -> torch.Tensor:
    """Run `_is_all_true`, the argument check of `torch.distributions`: in healthy training it succeeds."""
    result: torch.Tensor = by_shape(tensor)
    known = known_values.known_of(tensor)
    if known is None or known.assumed:
        known = tensors.Known(torch.tensor(True), tensors.Assumed.ANSWER)
    known_values.learn(result, known.value, assumed=known.assumed)
    return result


def _to_copy(operator: Any, by_shape: Kernel, tensor: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """Run `_to_copy`. Between host and device it is a copy over the host link (to the host: zeros)."""
    device, format_ = kwargs.get("device"), kwargs.get("memory_format") or torch.preserve_format
    if not tensors.is_on_device(tensor):
        dtype = kwargs.get("dtype")
        result = torch.empty_like(tensor, device=device, dtype=dtype, memory_format=format_)
        non_blocking = bool(kwargs.get("non_blocking"))
        # torch converts on the source's side, unless the copy is asynchronous to the CPU.
        source = tensor if dtype is None or non_blocking else tensor.to(dtype)
        return result.copy_(source, non_blocking=non_blocking)
    if device is None or tensors.is_simulated(torch.device(device)):
        return by_shape(tensor, **kwargs)
    dtype = kwargs.get("dtype") or tensor.dtype
    if dtype is not tensor.dtype:
        tensor = tensor.to(dtype)  # torch converts on the source's side
    nbytes = tensor.numel() * tensor.element_size()
    host = "meta" if torch.device(device).type == "meta" else "cpu"
    is_large = nbytes >= tensors.LARGE_ON_HOST
    strided = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=dtype, device="meta" if is_large else host
    )
    found = torch.zeros_like(strided, memory_format=format_)
    if is_large and host == "cpu":
        found = tensors.zeros_on_host(found.shape, found.stride(), dtype)
    non_blocking = bool(kwargs.get("non_blocking")) and host == "cpu"
    if non_blocking:
        tensors.pin(found)  # as in torch, so that the copy is asynchronous
    ACCELERATOR.copy_over_host_link(
        "DtoH", nbytes, blocking=not non_blocking, device=tensor, host=found if host == "cpu" else None
    )
    return known_values.mark_as_placeholders(found) if _is_guess(found, tensor) else found


def _is_guess(host: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Write the known numbers of a device tensor into `host`; return whether they are a guess."""
    known, numbers = known_values.known_of(tensor), choices.numbers_in(tensor)
    if numbers is not None:
        host.copy_(numbers)
        return bool(choices.assumed_of(tensor))
    if known is not None:
        host.fill_(known.value.item())
    return known is None or bool(known.assumed)


def _copy(
    operator: Any, by_shape: Kernel, first: torch.Tensor, second: torch.Tensor, non_blocking: bool = False
) -> torch.Tensor:
    """Run `copy_` or `_copy_from`: over the host link if one side is on the host."""
    into_first = operator._schema.name == "aten::copy_"
    target, source = (first, second) if into_first else (second, first)
    if tensors.is_on_device(target) and tensors.is_on_device(source):
        return by_shape(first, second, non_blocking)
    if tensors.is_on_device(target):
        nbytes = target.numel() * source.element_size()
        is_number = source.dim() == 0 and source.device.type == "cpu" and target.dim() == 0
        # A number is part of the launch; unpinned memory has been read when the call returns.
        beside = is_number or (non_blocking and _is_copied_as_it_is(source, target))
        host = None if is_number else source
        ACCELERATOR.copy_over_host_link("HtoD", nbytes, blocking=not beside, device=target, host=host)
        known_values.learn_from_host(target, source)
    else:
        waits = not (non_blocking and _is_copied_as_it_is(target, source))
        ACCELERATOR.copy_over_host_link("DtoH", source.nbytes, blocking=waits, device=source, host=target)
        if ACCELERATOR.follows_numbers:
            if known_values.known_of(source) is None and (
                target.numel() <= _SMALL or not target.is_floating_point()
            ):
                target.zero_()
            if _is_guess(target, source):
                known_values.mark_as_placeholders(target)
    return target


def _foreach_copy(
    operator: Any,
    by_shape: Kernel,
    targets: Sequence[torch.Tensor],
    sources: Sequence[torch.Tensor],
    non_blocking: bool = False,
) -> None:
    """Run `_foreach_copy_`: one kernel on the device, but one copy per tensor over the host link."""
    if all(map(tensors.is_on_device, (*targets, *sources))):
        by_shape(targets, sources, non_blocking)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking)


def _is_copied_as_it_is(host: torch.Tensor, device: torch.Tensor) -> bool:
    """Return whether the driver copies directly from or to this host memory.

    Unpinned memory is staged; strided memory is copied through a contiguous, unpinned host tensor.
    """
    if not tensors.is_pinned(host) or host.shape != device.shape:
        return False
    last = sum((size - 1) * stride for size, stride in zip(host.shape, host.stride(), strict=True))
    return host.is_contiguous() or (host.stride() == device.stride() and last + 1 == host.numel())


def _set(operator: Any, by_shape: Kernel, tensor: torch.Tensor, *source: Any) -> torch.Tensor:
    """Run `set_`, whose overloads all point a tensor at a storage.

    The source is another tensor, a storage, a part of a storage (offset, size and strides in elements), or
    nothing, which makes the tensor empty.
    """
    if operator is torch.ops.aten.set_.source_Tensor:
        other = source[0]
        storage, offset = other.untyped_storage(), int(other.storage_offset())
        return tensors.set_geometry(tensor, storage, offset, other.shape, other.stride())
    if operator is torch.ops.aten.set_.source_Storage_storage_offset:
        storage, offset, size = source[:3]
        stride = source[3] if len(source) > 3 and source[3] else tensors.contiguous_strides(size)
        return tensors.set_geometry(tensor, _untyped(storage), offset, size, stride)
    if operator is torch.ops.aten.set_.source_Storage:
        whole = _untyped(source[0])
        return tensors.set_geometry(tensor, whole, 0, (whole.nbytes() // tensor.element_size(),), (1,))
    fresh = torch.empty((0,), dtype=tensor.dtype, device=tensor.device)
    return tensors.set_geometry(tensor, fresh.untyped_storage(), 0, (0,), (1,))


def _untyped(storage: Any) -> torch.UntypedStorage:
    return storage if isinstance(storage, torch.UntypedStorage) else storage.untyped()


def _resize(
    operator: Any, by_shape: Kernel, tensor: torch.Tensor, size: Sequence[int], *, memory_format: Any = None
) -> torch.Tensor:
    """Run `resize_`: grow the storage if the new geometry needs more bytes."""
    storage = tensor.untyped_storage()
    elements = prod(size) + int(tensor.storage_offset())
    record = tensors.record_of(storage) or tensors.attach(storage, 0)
    if record.nbytes < elements * tensor.element_size():
        tensors.resize(record, elements * tensor.element_size())
    return tensors.set_geometry(
        tensor, storage, int(tensor.storage_offset()), size, tensors.contiguous_strides(size)
    )


def _record_stream(operator: Any, by_shape: Kernel, tensor: torch.Tensor, stream: torch.Stream) -> None:
    """Run `record_stream` on the allocator."""
    ACCELERATOR.timeline.cpu += ACCELERATOR.cpu_costs.view_ns
    tensors.use_on_stream(tensor, stream.stream_id)


def _like(operator: Any, by_shape: Kernel, *args: Any, **kwargs: Any) -> Any:
    """Run `zeros_like` or similar; `device` may request a host or meta tensor."""
    device = kwargs.get("device")
    if device is None or tensors.is_simulated(device):
        result: torch.Tensor = by_shape(*args, **kwargs)
        kind, _, of = operator._schema.name.removeprefix("aten::").partition("_")
        number = {"zeros": 0, "ones": 1, "full": args[-1]}.get(of if kind == "new" else kind)
        if number is not None:
            known_values.learn_from_host(result, number)
        return result
    pinned = kwargs.pop("pin_memory", None)
    made = operator(*tensors.meta_twin(args), **kwargs)
    return tensors.pin(made) if pinned else made


def _filled(operator: Any, by_shape: Kernel, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Run `fill_`, `full`, `ones`, `zeros`, `zero_` or `scalar_tensor` with a number from the host."""
    name = operator._schema.name.removeprefix("aten::")
    result: torch.Tensor = by_shape(*args, **kwargs)
    value = _OF_NAME[name] if name in _OF_NAME else args[name != "scalar_tensor"]
    is_computed = isinstance(choices.choice_of(result), tensors.Listed)
    if not (is_computed or (isinstance(value, torch.Tensor) and tensors.is_on_device(value))):
        known_values.learn_from_host(result, value)
    return result


_OF_NAME = {"ones": 1, "zeros": 0, "zero_": 0}


def _numbered(operator: Any, by_shape: Kernel, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Run `arange` or similar, whose numbers follow from the arguments."""
    result: torch.Tensor = by_shape(*args, **kwargs)
    if ACCELERATOR.follows_numbers and result.nbytes <= choices.MOST_LISTED and "out" not in kwargs:
        on_host = {"device": torch.device("cpu"), "dtype": result.dtype, "pin_memory": False}
        known_values.learn_from_host(result, operator(*args, **kwargs | on_host))
    return result


def _compared(
    operator: Any, by_shape: Kernel, first: torch.Tensor, second: Any, **kwargs: Any
) -> torch.Tensor:
    """Run `==`, `<` or similar, with the results of healthy training (`known_values.py`)."""
    name = operator._schema.name.removeprefix("aten::")
    result: torch.Tensor = by_shape(first, second, **kwargs)
    unknown = (
        known_values.known_of(result) is None
        and choices.choice_of(result) is None
        and tensors.is_on_device(first)
    )
    answer = known_values.compare(name, first, second) if unknown else None
    if answer is not None:
        checks_finite = first is second or (isinstance(second, float) and isinf(second))
        known_values.learn(
            result, answer, assumed=tensors.Assumed.GUESS if checks_finite else tensors.Assumed.ANSWER
        )
    return result


def _never(operator: Any, by_shape: Kernel, tensor: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """Run `isnan`, `isinf` or similar: simulated numbers are finite unless known otherwise."""
    result: torch.Tensor = by_shape(tensor, **kwargs)
    if known_values.known_of(result) is None and choices.choice_of(result) is None:
        known_values.learn(result, False, assumed=tensors.Assumed.GUESS)
    return result


def _found(operator: Any, by_shape: Kernel, elements: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Run `isin`: no unknown whole number (a sampled token) is among the elements; this is reported."""
    result: torch.Tensor = by_shape(elements, *args, **kwargs)
    is_whole = isinstance(elements, torch.Tensor) and not elements.is_floating_point()
    if (
        ACCELERATOR.follows_numbers
        and is_whole
        and known_values.known_of(result) is choices.choice_of(result) is None
    ):
        known_values.learn(result, kwargs.get("invert", False), assumed=tensors.Assumed.GUESS)
        ACCELERATOR.guess("torch.isin", "none is: sampled texts reach their longest")
    return result


def _index(operator: Any, by_shape: Kernel, tensor: torch.Tensor, indices: Sequence[Any]) -> torch.Tensor:
    """Run `tensor[indices]`; host indices have values."""
    if any(index is not None and index.is_cpu for index in indices):
        indices = on_host_resolved(tensor, indices)
    result: torch.Tensor = by_shape(tensor, by_places(indices))
    return result


def _masked_fill(
    operator: Any, by_shape: Kernel, tensor: torch.Tensor, mask: torch.Tensor, value: Any
) -> torch.Tensor:
    """Run `masked_fill`: the number of a host tensor is read and becomes part of the launch."""
    if isinstance(value, torch.Tensor) and value.is_cpu and value.dim() == 0:
        by_shape, value = getattr(operator.overloadpacket, "Scalar", operator), value.item()
    result: torch.Tensor = by_shape(tensor, mask, value)
    return result


def _counted(
    operator: Any, by_shape: Kernel, values: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Run `bincount` or `histc`: a router's load is assumed balanced over all bins, and reported."""
    name = operator._schema.name.removeprefix("aten::")
    weights = kwargs.get("weights", args[0] if args and name == "bincount" else None)
    numbers = choices.whole_numbers(values) if name == "bincount" and weights is None else None
    if numbers is not None:
        minlength = bind(operator, (values, *args), kwargs)["minlength"]
        counts = torch.bincount(choices.placed(numbers, values), minlength=minlength)
        result: torch.Tensor = by_shape(values, minlength=len(counts))
        choices.mark(result, Listed(counts, choices.assumed_of(values)))
        if choices.assumed_of(values):
            ACCELERATOR.guess("torch.bincount", f"assumed: {len(counts)} bins")
        return result
    result = by_shape(values, *args, **kwargs)
    bins = result.numel()
    if ACCELERATOR.follows_numbers and weights is None and bins and values.numel() % bins == 0:
        each = values.numel() // bins
        known_values.learn(result, each, assumed=tensors.Assumed.GUESS)
        ACCELERATOR.guess(f"torch.{name}", f"balanced: {each} in each of {bins} bins")
    return result


def _repeated(
    operator: Any,
    by_shape: Kernel,
    repeats: torch.Tensor,
    *args: Any,
    output_size: int | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Run `repeat_interleave`: known counts, e.g. of a balanced router, determine the result's length."""
    if output_size is None:
        numbers = choices.whole_numbers(repeats)
        if numbers is None:
            raise data_dependent(operator)
        output_size = int(choices.placed(numbers, repeats).sum())
        if choices.assumed_of(repeats):
            ACCELERATOR.guess("torch.repeat_interleave", f"assumed: {output_size}")
    result: torch.Tensor = by_shape(repeats, *args, output_size=output_size, **kwargs)
    return result


def _convolution(operator: Any, by_shape: Kernel, *args: Any, **kwargs: Any) -> Any:
    """Run a convolution or its gradients; channels last if cuDNN chooses so for input and weight."""
    backward, made = "backward" in operator._schema.name, by_shape(*args, **kwargs)
    x, weight = args[backward : backward + 2]
    format_ = {4: torch.channels_last, 5: torch.channels_last_3d}.get(weight.dim())
    is_last = [(each.stride(1), each.stride(-1)) == (1, each.shape[1]) for each in (x, weight)]
    if format_ is None or weight.dtype is torch.float64 or not any(is_last):
        return made
    for each in filter(None.__ne__, made[:2] if backward else [made]):
        strides = torch.empty(each.shape, device="meta", memory_format=format_).stride()
        tensors.set_geometry(each, each.untyped_storage(), 0, each.shape, strides)
    return made


SPECIAL_OPERATORS: dict[str, Kernel] = {
    **dict.fromkeys(("convolution", "convolution_backward"), _convolution),
    # CUDA's kernel supports no other format.
    "native_group_norm": lambda operator, by_shape, x, *args: by_shape(x.contiguous(), *args),
    **dict.fromkeys(LIKE, _like), "_local_scalar_dense": _item, "equal": _equal, "allclose": _equal,
    "_is_all_true": _all_valid, "_to_copy": _to_copy, "copy_": _copy, "_copy_from": _copy,
    "_foreach_copy_": _foreach_copy, "set_": _set, "resize_": _resize, "record_stream": _record_stream,
    **dict.fromkeys(("fill_", "full", "scalar_tensor", *_OF_NAME), _filled),
    **dict.fromkeys(("arange", "eye", "tril_indices", "triu_indices"), _numbered),
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), _compared),
    **dict.fromkeys(("isnan", "isinf", "isposinf", "isneginf"), _never), "index": _index,
    "isin": _found,
    **dict.fromkeys(("masked_fill", "masked_fill_"), _masked_fill), "bincount": _counted, "histc": _counted,
    "repeat_interleave": _repeated, **CHOICE_OPERATORS
}  # fmt: skip
