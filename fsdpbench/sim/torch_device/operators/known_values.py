"""Known values of simulated tensors, which otherwise have no data.

A number that comes from the host (`torch.tensor(tokens).cuda()`) is known and stays known through sums,
products and collectives. Comparisons of tensors without values have the results of healthy training: values
are finite, equal to themselves, and equal to no number. All other values are unknown and read as zero.

    isfinite(x)  ──>  (x == x) * (x.abs() != inf)      each factor is known, and so is the product
    count = torch.tensor(4).cuda(); all_reduce(count)  4 x ranks, if all ranks hold the same number

Operators on whole numbers from the host also run on the host, so that their results are known:

    labels.masked_fill(mask == 0, -100) != -100        a mask with a known count, so x[mask] has a length
    counts.cumsum(0), pad(counts), cat([zero, ends])   offsets, also of a router's balanced counts
    labels[:, 5:] = ids[:, 5:], labels.fill_(0)        writes in place, also through a view

A value belongs to a storage and holds for all of its elements. Views share it; `DTensor`s have it in their
local tensors. Writing anything else into the storage clears it. `assumed`: how certain the value is.
"""

import math
import operator as python
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from fsdpbench.base.files.documents import table_beside
from fsdpbench.sim.torch_device.accelerator import ACCELERATOR
from fsdpbench.sim.torch_device.operators.choices import (
    MOST_LISTED,
    assumed_of,
    choice_of,
    followed_choice,
    mark,
    numbers_in,
    placed,
    whole_numbers,
)
from fsdpbench.sim.torch_device.strict.shapes import INDEXING, known_bounds, refuse_out_of_range
from fsdpbench.sim.torch_device.strict.words import UNDECLARED_WRITES, bind, packet_of
from fsdpbench.sim.torch_device.tensors import (
    Assumed,
    Known,
    Listed,
    forget,
    is_on_device,
    record_of,
    remember,
    tensors_in,
)

Number = float | int | bool | complex
# The operator of a `GradScaler`. If all gradients are finite, the scale stays, except for its growth.
_UPDATE_SCALE = "aten::_amp_update_scale_"
_OF_ITSELF = {"eq": True, "le": True, "ge": True, "ne": False, "lt": False, "gt": False}
_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {name: getattr(python, name) for name in _OF_ITSELF}
_SAME, _COMPUTED = map(frozenset, table_beside(__file__, "names.toml")["known_values"].values())
_DECIDING = {"bitwise_or": True, "logical_or": True, "bitwise_and": False, "logical_and": False}
"""Values of one operand that determine the result, whatever the other is."""
_UNLIKE = {"cumsum", "cumprod", "cat", "constant_pad_nd", "tril", "triu", "argmax", "argmin"}
"""Operators that turn equal numbers into different ones."""
_TIED = {"topk", "median", "kthvalue"}
"""Operators whose indices differ on a GPU if numbers are equal."""


def computed(
    operator: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    taken: Sequence[torch.Tensor],
    written: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
) -> bool:
    """Store an operator's results if the numbers of all its tensors are known; return whether it did."""
    name = operator._schema.name.removeprefix("aten::")
    if torch.Tag.pointwise not in operator.tags and name not in _COMPUTED:
        return False
    is_known = name in _UNLIKE or any(isinstance(choice_of(each), Listed) for each in taken)
    is_known |= any(each.nbytes < each.untyped_storage().nbytes() for each in written)
    if not is_known or any(each.is_floating_point() or each.nbytes > MOST_LISTED for each in results):
        return False
    stores: dict[int, torch.Tensor] = {}
    assumed = assumed_of(*taken)
    for tensor in taken:
        is_filled = args[0] is tensor and _writes_all(name, *args)
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
            mark(each, Listed(stores[id(each.untyped_storage())], assumed))
        return True
    values = [*found] if isinstance(found, (list, tuple)) else [found]
    if name in _TIED and len(values) > 1 and not _are_distinct(twin(args[0]), bind(operator, args, kwargs)):
        values, results = values[:1], results[:1]
    return min(_keep(result, value, assumed) for result, value in zip(results, values, strict=True))


def _are_distinct(numbers: torch.Tensor, given: Mapping[str, Any]) -> bool:
    """Return whether no two numbers along a call's dimension are equal, and their order is defined."""
    ordered = numbers.reshape(numbers.shape or (1,)).sort(given["dim"]).values
    return bool(ordered.diff(dim=given["dim"]).all()) and given.get("sorted", True)


def _writes_all(name: str, target: Any, source: Any = None, index: Any = None, *rest: Any) -> bool:
    """Return whether `copy_`, or `scatter_` as in `invert_permutation`, writes the whole storage."""
    record = record_of(target.untyped_storage()) if name in ("copy_", "scatter_") else None
    if record is None or record.nbytes != target.nbytes:
        return False
    if name == "copy_":
        return target is not source
    places = numbers_in(index)
    return places is not None and places.dim() == 1 and len(places.unique()) == target.numel()


def _keep(result: torch.Tensor, value: torch.Tensor, assumed: Assumed) -> bool:
    """Store a result's numbers if they fill its storage in the same order."""
    record = record_of(result.untyped_storage())
    storage = value.untyped_storage()
    alike = result.dtype == value.dtype and result.shape == value.shape and result.stride() == value.stride()
    if record is None or not alike or value.is_floating_point() or storage.nbytes() != record.nbytes:
        return False
    mark(result, Listed(value.new_empty(0).set_(storage), assumed))
    return True


def learn(tensor: torch.Tensor, value: Number | torch.Tensor, *, assumed: Assumed) -> None:
    """Set the known value of all elements of `tensor`, if they are its whole storage."""
    record = record_of(tensor.untyped_storage())
    if record is None:
        return
    distinct = math.prod(n for n, step in zip(tensor.shape, tensor.stride(), strict=True) if step)
    if not tensor.numel() or distinct * tensor.element_size() < record.nbytes:
        forget(record)
        return
    exact = torch.float64 if isinstance(value, float) else None
    number = torch.as_tensor(value, dtype=exact).detach().as_subclass(torch.Tensor)
    # Copied, because a script may follow its own tensor and mark it.
    remember(record, Known(number.to(tensor.dtype, copy=True).reshape(1), assumed), None)


def assume(tensor: torch.Tensor) -> None:
    """Mark the known value or numbers of a tensor as a guess."""
    record = record_of(tensor.untyped_storage())
    if record is not None and record.known is not None and not record.known.assumed:
        remember(record, Known(record.known.value, Assumed.GUESS), None)
    elif record is not None and isinstance(record.choice, Listed):
        remember(record, None, Listed(record.choice.values, max(record.choice.assumed, Assumed.GUESS)))


def known_of(tensor: torch.Tensor) -> Known | None:
    """Return the known value of a device tensor."""
    record = record_of(tensor.untyped_storage())
    if record is None or not tensor.numel():
        return None
    if isinstance(record.choice, Listed) and record.nbytes == tensor.element_size():
        return Known(record.choice.values.view(tensor.dtype), record.choice.assumed)  # loaded directly
    known = record.known  # if of another dtype, its bytes are other numbers here
    return known if known is None or known.value.dtype is tensor.dtype else None


def learn_from_host(target: torch.Tensor, source: Any) -> None:
    """Set the known value of `target`, which the host filled with a number or a tensor."""
    is_number = not isinstance(source, torch.Tensor) or source.dim() == 0
    is_a_part = target.nbytes < target.untyped_storage().nbytes()
    numbers = whole_numbers(target) if is_a_part and ACCELERATOR.follows_numbers else None
    if numbers is not None and not (isinstance(source, torch.Tensor) and holds_placeholders(source)):
        numbers = numbers.clone()
        placed(numbers, target).copy_(torch.as_tensor(source))
        mark(target, Listed(numbers, assumed_of(target)))
    elif ACCELERATOR.follows_numbers and (target.numel() == 1 or (is_number and target.dtype in _WHOLE)):
        is_guess = isinstance(source, torch.Tensor) and holds_placeholders(source)
        learn(target, source, assumed=Assumed(is_guess))
    elif ACCELERATOR.follows_numbers and _are_listed(target, source):
        mark(target, Listed(source.detach().expand(target.shape).reshape(-1).clone()))
    elif ACCELERATOR.known_values:
        forget(record_of(target.untyped_storage()))


def _are_listed(target: torch.Tensor, source: Any) -> bool:
    """Return whether the host tensor `source` is a storage's whole content, in whole numbers."""
    if not isinstance(source, torch.Tensor) or source.dtype not in _WHOLE or holds_placeholders(source):
        return False
    record = record_of(target.untyped_storage())
    fits = record is not None and record.nbytes == target.numel() * target.element_size() <= MOST_LISTED
    return fits and target.dtype is source.dtype and target.is_contiguous()


_WHOLE = (torch.uint8, torch.bool, torch.int32, torch.int64)
_HOLDS_PLACEHOLDERS = "_sim_placeholders"
_MOST_FILLED = 1 << 16
_NUMBERS = 64
"""Copies of up to this many elements are numbers to print, not parts of a model."""


def mark_as_placeholders(host: torch.Tensor) -> torch.Tensor:
    """Mark a host tensor as copied from the device without values."""
    host.untyped_storage()._sim_placeholders = True  # type: ignore[attr-defined]
    if host.numel() > _NUMBERS:
        ACCELERATOR.copied_to_host = True
    return host


def unmark_placeholders(host: torch.Tensor) -> None:
    """Take the mark off a tensor that gets values."""
    host.untyped_storage().__dict__.pop(_HOLDS_PLACEHOLDERS, None)


def holds_placeholders(host: torch.Tensor) -> bool:
    """Return whether a host tensor (or its base) was copied from the device without values."""
    return getattr(host.untyped_storage(), _HOLDS_PLACEHOLDERS, False)


def compare(name: str, first: torch.Tensor, second: Any) -> bool | None:
    """Return healthy training's result of comparing a tensor with a number or with itself."""
    if first is second:
        return _OF_ITSELF[name]
    if isinstance(second, torch.Tensor):
        known = known_of(second) if is_on_device(second) else None
        if second.numel() != 1 or (known is None and is_on_device(second)):
            return None
        second = second.item() if known is None else known.value.item()
    if not ACCELERATOR.follows_numbers and not (isinstance(second, float) and math.isinf(second)):
        return None
    if name in ("eq", "ne"):
        return name == "ne"
    return None if isinstance(second, complex) else bool(_COMPARISONS[name](0, second))


def follow(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
    """Set the known values of an operator's results, if any of its tensors has one."""
    taken = [tensor for tensor in tensors_in(args, kwargs) if is_on_device(tensor)]
    if computed(operator, args, kwargs, taken, written(operator, args, kwargs), _results(result)):
        return
    _follow_known(operator, args, kwargs, result, taken)
    _follow_choices(operator, args, kwargs, result, taken)


def _follow_choices(
    operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, taken: list[torch.Tensor]
) -> None:
    """Set the choices of an operator's results, if any of its tensors has a router's choice."""
    choices = [choice_of(tensor) for tensor in taken]
    if all(choice is None for choice in choices):
        return
    changed = written(operator, args, kwargs)
    results = [tensor for tensor in _results(result) if is_on_device(tensor)]
    old = {id(tensor.untyped_storage()) for tensor in taken}
    if not changed and all(id(tensor.untyped_storage()) in old for tensor in results):
        return  # views
    found = followed_choice(operator._schema.name.removeprefix("aten::"), args, taken, choices, results)
    for tensor in changed or results[:1]:
        if found.number is not None:
            learn(tensor, found.number, assumed=Assumed.GUESS)
        if found.choice is not None or changed:
            mark(tensor, found.choice)


def _follow_known(
    operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, taken: list[torch.Tensor]
) -> None:
    changed = written(operator, args, kwargs)
    if all(known_of(tensor) is None for tensor in taken):
        for tensor in changed:
            if choice_of(tensor) is None:  # its value is known in another dtype
                forget(record_of(tensor.untyped_storage()))
        return
    if packet_of(operator) in INDEXING:
        _refuse_known_indices(operator, args, kwargs)
    if result is None and _changed_each(operator._schema.name.removeprefix("aten::"), args):
        return
    results = [tensor for tensor in _results(result) if is_on_device(tensor)]
    known = _evaluate(operator, args, kwargs, taken, results)
    old = {id(tensor.untyped_storage()) for tensor in taken}
    for tensor in results:
        is_view = id(tensor.untyped_storage()) in old and not changed
        if known is not None and not is_view:
            learn(tensor, known.value, assumed=known.assumed)
    if known is None and operator._schema.name != _UPDATE_SCALE:
        for tensor in changed:
            forget(record_of(tensor.untyped_storage()))


def _changed_each(name: str, args: Sequence[Any]) -> bool:
    """Apply `_foreach_add_(steps, 1)` or similar to each known value; return whether `name` is one."""
    of_each = _FOREACH.get(name)
    if of_each is None or len(args) != 2 or not isinstance(args[1], (int, float)):
        return False
    for tensor in args[0]:
        known = known_of(tensor)
        if known is None:
            forget(record_of(tensor.untyped_storage()))
        else:
            learn(tensor, of_each(known.value, args[1]), assumed=known.assumed)
    return True


_FOREACH = {"_foreach_add_": python.add, "_foreach_sub_": python.sub, "_foreach_mul_": python.mul}


def _refuse_known_indices(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise a GPU's error for a known index that is out of range."""
    for index, low, high, dim in known_bounds(packet_of(operator), bind(operator, args, kwargs)):
        known = known_of(index) if is_on_device(index) else None
        if known is not None and not known.assumed:
            refuse_out_of_range(int(known.value.item()), low, high, dim)


def _evaluate(
    operator: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    taken: list[torch.Tensor],
    results: list[torch.Tensor],
) -> Known | None:
    name = operator._schema.name.removeprefix("aten::")
    if name == "copy_" and len(taken) == 2:
        return known_of(taken[1])
    known = [known_of(tensor) for tensor in taken]
    if not results or any(each is None for each in known):
        decides = _DECIDING.get(name) if results and results[0].dtype is torch.bool else None
        bools = [each for each in known if each is not None and each.value.dtype is torch.bool]
        return next((each for each in bools if each.value.item() is decides), None)
    values = [each.value for each in known if each is not None]
    assumed = max(each.assumed for each in known if each is not None)
    if name in _SAME and len(results) == 1 and all(torch.equal(value, values[0]) for value in values):
        return Known(values[0] != 0 if name in ("all", "any") else values[0], assumed)
    if name in ("sum", "prod"):
        count = math.prod(taken[0].shape) // max(1, math.prod(results[0].shape))
        value = values[0].to(results[0].dtype)
        return Known(value * count if name == "sum" else value**count, assumed)
    pointwise = torch.Tag.pointwise in operator.tags or name == "floor_divide"  # torch lacks its tag
    if pointwise and len(results) == 1:
        found = operator(*map(_host_twin, args), **{key: _host_twin(value) for key, value in kwargs.items()})
        return Known(found.reshape(1), assumed)
    return None


def _host_twin(value: Any) -> Any:
    """Return a known value with the tensor's number of dimensions, which determines the result's dtype."""
    if not isinstance(value, torch.Tensor):
        return torch.device("cpu") if isinstance(value, torch.device) else value
    known = known_of(value) if is_on_device(value) else None
    single = value if known is None else known.value
    return single.detach().clone().reshape((1,) * value.dim())


def _results(result: Any) -> list[torch.Tensor]:
    return tensors_in(result if isinstance(result, tuple) else (result,), {})


@cache
def _written_arguments(operator: Any) -> tuple[str, ...]:
    """Return the names of the arguments that an operator writes."""
    schema = operator._schema
    declared = [each.name for each in schema.arguments if each.alias_info and each.alias_info.is_write]
    return (*declared, *UNDECLARED_WRITES.get(schema.name, ()))


def written(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors of a call that the operator writes."""
    names = _written_arguments(operator)
    given = bind(operator, args, kwargs) if names else {}
    return tensors_in([given[name] for name in names], {})


def follow_collective(what: Any, size: int, rank: int) -> None:
    """Set the known values of a collective's outputs, assuming that every rank holds this rank's values.

    `what`: a `Collective` of the group's member `rank`, which may be the source of a broadcast.
    """
    kind, inputs, outputs = what.kind, what.inputs, what.outputs
    guess = Assumed(not _is_sent(what, rank))
    rows = [numbers_in(tensor) if is_on_device(tensor) else None for tensor in inputs]
    known = [known_of(tensor) if is_on_device(tensor) else None for tensor in inputs]
    same = known[0] if known and all(each == known[0] for each in known) else None
    for place, output in enumerate(outputs):
        listed = choice_of(output)
        if kind == "broadcast" and inputs is outputs and isinstance(listed, Listed):
            mark(output, Listed(listed.values, max(listed.assumed, guess)))
            continue
        forget(record_of(output.untyped_storage()))
        row = rows[place if len(rows) == len(outputs) else 0] if rows else None
        if same is not None:
            learn(output, _reduced(what, same.value, size), assumed=max(same.assumed, guess))
        elif row is not None and kind in ("all_reduce", "all_gather"):
            row = _reduced(what, row.reshape(-1), size).to(output.dtype)
            row = row.repeat(output.numel() // max(1, row.numel()))
            if _are_listed(output, row):
                mark(output, Listed(row, Assumed.GUESS))


def _is_sent(what: Any, rank: int) -> bool:
    """Return whether member `rank` is the source of the collective's result."""
    return what.kind == "broadcast" and getattr(what.opts, "rootRank", None) == rank


def _reduced(what: Any, value: torch.Tensor, size: int) -> torch.Tensor:
    """Return a collective's result if all `size` ranks have the same value."""
    if what.kind not in ("all_reduce", "reduce_scatter"):
        return value
    reduction = getattr(what.opts, "reduceOp", None)
    if reduction == dist.ReduceOp.SUM:
        return value * size
    return value**size if reduction == dist.ReduceOp.PRODUCT else value


def fill_on_host(what: Any, size: int, rank: int) -> None:
    """Compute a collective of host tensors like `follow_collective`, and mark assumed results."""
    inputs, outputs = what.inputs, what.outputs
    for place, output in enumerate(outputs if ACCELERATOR.follows_numbers else ()):
        if inputs and output.numel() <= _MOST_FILLED:
            each = inputs[place if len(inputs) == len(outputs) else rank % len(inputs)]
            row = each.detach().reshape(-1)
            if row.numel() > output.numel():
                row = row[: row.numel() // size * size].view(size, -1)[rank]
            if row.numel() and output.numel() % row.numel() == 0:
                filled = _reduced(what, row, size).repeat(output.numel() // row.numel())
                output.detach().copy_(filled.view(output.shape))
        if size > 1 and not _is_sent(what, rank):
            output.untyped_storage()._sim_placeholders = True
            if type(output) is torch.Tensor and ACCELERATOR.host_kind is not None:
                output.__class__ = ACCELERATOR.host_kind
