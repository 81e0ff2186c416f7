"""The table of prices: a rule for each family of operators; `families.toml` lists the operators.

An operator is one of: only geometry (free), a matrix product or convolution, attention, or limited by memory.
Operators without a row are priced by their bytes as well, and reported as unknown, never silently free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from fsdpbench.base.files.documents import table_beside
from fsdpbench.sim.model.kernel_costs import KernelCosts
from fsdpbench.sim.torch_device.prices import layers, memory, products
from fsdpbench.sim.torch_device.prices.libraries import OF_LIBRARIES

_TABLE = table_beside(__file__, "families.toml")
_GRADIENTS = frozenset(f"{name}_backward" for name in _TABLE.pop("activations"))
FAMILIES: Mapping[str, Sequence[str]] = _TABLE
"""Operators by family, by name without namespace and overload: the rest of `families.toml`."""
_RULES: dict[str, products.Price] = {
    "only geometry": lambda call, costs: products.FREE,
    "matrix products": products.product(0), "scaled products": products.scaled,
    "products of groups": products.grouped, "matrix products that are added": products.product(1),
    "convolutions": layers.convolution, "gradients of convolutions": layers.convolution_backward,
    "flash attention": partial(products.attention_forward, causal_at=4),
    "attention with a bias": partial(products.attention_forward, causal_at=6, bias_at=3),
    "flash attention, backward": partial(products.attention_backward, causal_at=11),
    "attention with a bias, backward": partial(products.attention_backward, causal_at=11, bias_at=4),
    "rows that are looked up": memory.moves("gather", memory.rows_read),
    "gradients of look-ups": memory.moves("gather", memory.rows_added),
    "bags of rows": memory.moves("gather", memory.bags_read),
    "gradients of bags": memory.moves("gather", memory.bags_added),
    "rows written in place": memory.moves("gather", memory.rows_written),
    "rows filled with a number": memory.moves("gather", memory.rows_filled),
    "rows written into a copy": memory.moves("gather", memory.copied_rows_written),
    "rows filled in a copy": memory.moves("gather", memory.copied_rows_filled),
    "losses of classification": memory.moves("gather", memory.chosen_entries),
    "their gradients": memory.moves("gather", memory.whole_output),
    "copies": memory.moves("copy"), "copies by strides": memory.copied,
    "reductions to some dimensions": memory.reduction, "reductions": memory.moves("reduction"),
    "sorting, and what selects by digits": memory.moves("reduction", passes=4),
    "Fourier transforms": memory.moves("reduction", memory.each_dimension),
    "layer norms": layers.layer_norm, "batch norms": layers.batch_norm,
    "gradients of norms": memory.moves("reduction", reread=True),
    "an element at a time": memory.moves("pointwise"),
}  # fmt: skip
"""The price rule of each family."""


_OPTIMIZER, _LISTS = memory.moves("optimizer"), memory.moves("pointwise")
UNKNOWN = memory.moves("pointwise", unknown=True)

_KERNELS = "triton::"
_BY_NAME = {name: _RULES[family] for family, operators in FAMILIES.items() for name in operators}
_OF_USERS: dict[str, products.Price] = {}


def price(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, costs: KernelCosts
) -> products.OperatorCost:
    """Return the cost of a call `func(*args, **kwargs)` on meta tensors that returned `out`; never raises."""
    outs = [i for i in (out if isinstance(out, (list, tuple)) else [out]) if isinstance(i, torch.Tensor)]
    call = products.Call(func, args, kwargs, outs)
    own = _OF_USERS.get(func._schema.name)
    return own(call, costs) if own is not None else rule_of(func)(call, costs)


def price_of_kernel(name: str, arguments: Mapping[str, object], costs: KernelCosts) -> products.OperatorCost:
    """Return the cost of a launch of the Triton kernel `name`; `arguments` by name, tensors on meta."""
    operator = SimpleNamespace(_schema=SimpleNamespace(name=f"{_KERNELS}{name}"))
    tensors = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
    rule = _OF_USERS.get(operator._schema.name) or OF_LIBRARIES.get(operator._schema.name, UNKNOWN)
    return rule(products.Call(operator, tensors, dict(arguments), ()), costs)


def has_own_price(func: Any) -> bool:
    """Return whether a user has set this operator's price, by whatever rule."""
    return func._schema.name in _OF_USERS


def rule_of(func: Any) -> products.Price:
    """Return the rule of an operator's family."""
    name = products.operator_name(func)
    found = OF_LIBRARIES.get(func._schema.name) or _BY_NAME.get(name)
    if found is not None:
        return found
    if name.startswith(("_fused_ad", "_fused_sgd")):
        return _OPTIMIZER
    if name.startswith("_foreach_"):
        return _LISTS
    if torch.Tag.pointwise in func.tags:
        return memory.elementwise
    return _LISTS if name in _GRADIENTS else UNKNOWN


def operator_price(name: Any) -> Callable[[products.Price], products.Price]:
    """Let the decorated function price the operator `name` (`namespace::operator`), before the table's rule.

    `name` may be a Triton kernel, or `triton::` and its function's name. The `Call` of a kernel has its
    tensors as `args`, and tensors and numbers by name as `kwargs`; its results are unknown.

        from fsdpbench.sim.torch_device.prices import OperatorCost, operator_price, tensor_bytes
        @operator_price("mylib::fused_norm")
        def fused_norm(call, costs):
            duration = costs.memory_bound_ns(3 * tensor_bytes(call.outs[0]), "reduction")
            return OperatorCost("fused_norm_kernel", duration)

    It is called once for each distinct call with a `Call` (meta tensors: shapes, strides, dtypes) and the
    device's `KernelCosts`, and returns an `OperatorCost`. On real devices nothing calls it.

    Raises `ValueError` if `name` has no namespace, or has a price of a user's already.
    """
    if not isinstance(name, str):
        while not isinstance(getattr(name, "__name__", None), str) and hasattr(name, "fn"):
            name = name.fn  # what tunes a kernel
        name = f"{_KERNELS}{getattr(name, '__name__', '')}"
    namespace, separator, operator = name.partition("::")
    if not (namespace and separator and operator):
        raise ValueError(
            f"operator_price({name!r}): write namespace::operator, for example mylib::fused_norm"
        )
    if name in _OF_USERS:
        raise ValueError(f"operator_price({name!r}): this operator has a price already")

    def register(function: products.Price) -> products.Price:
        _OF_USERS[name] = function
        return function

    return register
