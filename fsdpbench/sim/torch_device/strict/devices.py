"""Refusals of host tensors in calls with device tensors.

On CUDA torch refuses them in three ways; each operator uses one:

* a check in the kernel's wrapper, which torch's code generator writes from `native_functions.yaml` (part of
  torch's package, and read here too): every tensor must be on the device of the first one;
* `TensorIterator`: one number, i.e. a host tensor without dimensions, may accompany device tensors;
* a rule of its own (indices may be on the host).
"""

import importlib.util
import re
from collections.abc import Callable, Iterator
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any, NoReturn

import torch

from fsdpbench.sim.torch_device.strict.words import Arguments, error_text, packet_of
from fsdpbench.sim.torch_device.tensors import is_on_device

_LIST = "packaged/ATen/native/native_functions.yaml"
_IS_OUT = re.compile(r"\*,.*\(a!\)")
_MANY_NUMBERS = {"where"}
"""Operators that move all numbers on the host to the device."""


def refuse_other_devices(operator: Any, arguments: Arguments) -> None:
    """Raise `RuntimeError` for a mix of devices that CUDA refuses."""
    tensors = [tensor for _, tensor in _named_tensors(arguments)]
    if not any(tensor.is_cpu for tensor in tensors) or not any(map(is_on_device, tensors)):
        return
    packet = packet_of(operator)
    rule = _OWN_RULES.get(packet)
    if rule is not None:
        rule(arguments)
        return
    aliased = [each for each in operator._schema.arguments if each.alias_info is not None]
    written = {each.name for each in aliased if each.alias_info.is_write}
    if packet.startswith("_foreach_"):
        for column in _columns(arguments, written):
            _as_iterator(column, 1)
        return
    method = _generated_checks().get(str(operator._schema.name) + "." + operator._schema.overload_name)
    if method is not None:
        _as_wrapper(method, arguments, operator)
    else:
        named = [(name in written, tensor) for name, tensor in _named_tensors(arguments)]
        _as_iterator(named, len(named) if packet in _MANY_NUMBERS else 1)


@cache
def _generated_checks() -> dict[str, str]:
    """Return the wrappers that check devices in this torch, by operator. Called at the first mix."""
    spec = importlib.util.find_spec("torchgen")
    roots = [Path(root) for root in (spec.submodule_search_locations or [])] if spec else []
    text = next(((root / _LIST).read_text() for root in roots if (root / _LIST).exists()), "")
    found = {}
    for entry in re.split(r"^- func: ", text, flags=re.MULTILINE)[1:]:
        name, _, overload = entry[: entry.index("(")].partition(".")
        structured = "structured: True" in entry or "structured_delegate:" in entry
        if "device_check: NoCheck" in entry or not (structured or _dispatches_to_cuda(entry)):
            continue
        called = f"{name}_out" if _IS_OUT.search(entry.splitlines()[0]) else name
        parts = (called, overload) if structured else (overload, called)
        method = "_".join(parts) if overload or not structured else called
        found[f"aten::{name}.{overload}"] = f"wrapper_CUDA_{method}"
    return found


def _dispatches_to_cuda(entry: str) -> bool:
    """Return whether an indented line of an operator's entry has CUDA before a colon."""
    lines = (line.partition("CUDA") for line in entry.splitlines() if line.startswith("    "))
    return any(cuda and ":" in rest for _, cuda, rest in lines)


def _as_wrapper(method: str, arguments: Arguments, operator: Any) -> None:
    """Check like a generated wrapper: outputs first, then the positional arguments."""
    schema = operator._schema.arguments
    order = [a.name for a in schema if a.is_out] + [a.name for a in schema if not a.kwarg_only]
    common: torch.device | None = None
    for wanted in order:
        for name, tensor in _named_tensors({wanted: arguments[wanted]}):
            if common is None:
                common = tensor.device
            elif tensor.device != common:
                _refuse_argument(name, tensor, common, method)


def _refuse_argument(name: str, tensor: torch.Tensor, common: torch.device, method: str) -> NoReturn:
    raise RuntimeError(error_text("devices.method", name, tensor.device, common, method))


def _as_iterator(tensors: list[tuple[bool, torch.Tensor]], numbers: int) -> None:
    """Check like `TensorIterator`. `tensors`: (is written, tensor); accepts `numbers` host numbers."""
    common = next((tensor.device for _, tensor in tensors if not tensor.is_cpu), None)
    if common is None:
        return
    for written, tensor in tensors:
        if tensor.device == common:
            continue
        if tensor.is_cpu and tensor.dim() == 0 and not written:
            numbers -= 1
            if numbers < 0:
                raise RuntimeError("Trying to pass too many CPU scalars to non-CPU kernel!")
            continue
        raise RuntimeError(error_text("devices.two", common, tensor.device))


def _columns(arguments: Arguments, written: set[str]) -> Iterator[list[tuple[bool, torch.Tensor]]]:
    """Yield, for each position of a foreach operator's lists, the tensors there and those outside lists."""
    every = {name: value for name, value in arguments.items() if isinstance(value, (list, tuple))}
    lists = {n: v for n, v in every.items() if any(isinstance(each, torch.Tensor) for each in v)}
    alone = [(name in written, v) for name, v in arguments.items() if isinstance(v, torch.Tensor)]
    for column in zip_longest(*lists.values()):
        pairs = zip(lists, column, strict=True)
        yield [(name in written, t) for name, t in pairs if isinstance(t, torch.Tensor)] + alone


def _embedding(arguments: Arguments) -> None:
    """Check like `index_select` of the weight."""
    weight, indices = arguments["weight"], arguments["indices"]
    if indices.device != weight.device:
        _refuse_argument("index", indices, weight.device, "wrapper_CUDA__index_select")


def _stacked(arguments: Arguments) -> None:
    """Check like a concatenation."""
    tensors = arguments["tensors"]
    for tensor in tensors:
        if tensor.device != tensors[0].device:
            _refuse_argument("tensors", tensor, tensors[0].device, "wrapper_CUDA_cat")


def _indexed(arguments: Arguments) -> None:
    """Accept host indices for device tensors, but not vice versa."""
    tensor = arguments["self"]
    for index in arguments["indices"]:
        if isinstance(index, torch.Tensor) and not index.is_cpu and index.device != tensor.device:
            raise RuntimeError(error_text("devices.indices", tensor.device))
    values = arguments.get("values")
    if isinstance(values, torch.Tensor):
        _as_iterator([(True, tensor), (False, values)], 1)


def _masked(arguments: Arguments) -> None:
    tensor, mask = arguments["self"], arguments["mask"]
    if tensor.device != mask.device:
        raise RuntimeError(error_text("devices.mask", mask.device, tensor.device))


def _not_here(arguments: Arguments) -> None:
    """Accept copies between devices, operators that look only at shapes, and convolutions, which compare
    types (`dtypes.py`) and therefore devices."""


_OWN_RULES: dict[str, Callable[[Arguments], None]] = {
    "embedding": _embedding,
    "stack": _stacked,
    **dict.fromkeys(
        ("index", "_unsafe_index", "index_put", "_index_put_impl", "_unsafe_index_put"), _indexed
    ),
    "masked_fill": _masked,
    **dict.fromkeys(
        ("convolution", "copy", "_foreach_copy", "is_same_size", "_has_same_storage_numel"), _not_here
    ),
}


def _named_tensors(arguments: Arguments) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all tensors of a call, including those in lists, with the names of their arguments."""
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, (list, tuple)):
            yield from ((name, item) for item in value if isinstance(item, torch.Tensor))
