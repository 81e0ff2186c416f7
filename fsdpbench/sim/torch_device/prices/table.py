"""From an operator call to its cost, and prices of the user's own operators.

    from fsdpbench.sim.torch_device.prices import OperatorCost, operator_price, tensor_bytes

    @operator_price("mylib::fused_norm")
    def fused_norm(call, costs):
        duration = costs.memory_bound_ns(3 * tensor_bytes(call.outs[0]), "reduction")
        return OperatorCost("fused_norm_kernel", duration)

A price is asked for once a distinct call (see `plans.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fsdpbench.sim.model.kernel_costs import KernelCosts
from fsdpbench.sim.torch_device.prices.families import FAMILIES, PATTERNS, UNKNOWN
from fsdpbench.sim.torch_device.prices.products import Call, OperatorCost, Price, operator_name

_BY_NAME: dict[str, Price] = {name: family.price for family in FAMILIES for name in family.operators}
_OF_USERS: dict[str, Price] = {}


def price(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any, costs: KernelCosts
) -> OperatorCost:
    """Cost of a call that ran on meta tensors and returned ``out``. Never raises for an unknown operator."""
    outs = [
        item for item in (out if isinstance(out, (list, tuple)) else [out]) if isinstance(item, torch.Tensor)
    ]
    call = Call(func, args, kwargs, outs)
    own = _OF_USERS.get(func._schema.name)
    return own(call, costs) if own is not None else rule_of(func)(call, costs)


def has_own_price(func: Any) -> bool:
    """Whether a user prices this operator, by whatever rule."""
    return func._schema.name in _OF_USERS


def rule_of(func: Any) -> Price:
    """The rule of an operator's family."""
    name = operator_name(func)
    found = _BY_NAME.get(name)
    if found is not None:
        return found
    return next((pattern.price for pattern in PATTERNS if pattern.matches(func, name)), UNKNOWN)


def operator_price(name: str) -> Callable[[Price], Price]:
    """Let the decorated function price the operator `name` (`namespace::operator`), before the table's rule.

    It is called with a `Call` (meta tensors: shapes, strides, dtypes) and the device's `KernelCosts`, and
    returns an `OperatorCost`. On real devices nothing calls it.

    Raises:
        ValueError: `name` has no namespace, or has a price of a user's already.
    """
    namespace, separator, operator = name.partition("::")
    if not (namespace and separator and operator):
        raise ValueError(
            f"operator_price({name!r}): write namespace::operator, for example mylib::fused_norm"
        )
    if name in _OF_USERS:
        raise ValueError(f"operator_price({name!r}): this operator has a price already")

    def register(function: Price) -> Price:
        _OF_USERS[name] = function
        return function

    return register
