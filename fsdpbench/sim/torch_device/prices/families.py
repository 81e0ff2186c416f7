"""The table of prices: a rule for each family of operators; `families.toml` lists the operators.

An operator is one of: only geometry (free), a matrix product or convolution, attention, or limited by memory.
Operators without a row are priced by their bytes as well, and reported as unknown, never silently free.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from fsdpbench.base.errors import error_text
from fsdpbench.base.files.documents import table_beside
from fsdpbench.sim.model.kernel_costs import KernelCosts
from fsdpbench.sim.torch_device.flops import compute_type
from fsdpbench.sim.torch_device.prices import layers, memory, products
from fsdpbench.sim.torch_device.strict.words import bind

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
    "packed attention": lambda call, costs: _packed(call, costs, backward=False),
    "packed attention, backward": lambda call, costs: _packed(call, costs, backward=True),
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
        raise ValueError(error_text("families.name", name))
    if name in _OF_USERS:
        raise ValueError(f"operator_price({name!r}): this operator has a price already")

    def register(function: products.Price) -> products.Price:
        _OF_USERS[name] = function
        return function

    return register


def _flash(call: products.Call, costs: KernelCosts, *, backward: bool) -> products.OperatorCost:
    """Price flash-attn's operators.

    Their tensors are of (batch, length, heads, size), or packed ones of (tokens, heads, size), whose
    sequences are taken as equally long.
    """
    given = bind(call.func, call.args, call.kwargs)
    query, key = given["q"], given["k"]
    if query.dim() == 3:
        batch = given["cu_seqlens_q"].shape[0] - 1
        lengths = query.shape[0] // batch, key.shape[0] // batch
    else:
        batch, lengths = query.shape[0], (query.shape[1], key.shape[1])
    dtype = compute_type(query.dtype)
    price = costs.attention_backward_ns if backward else costs.attention_forward_ns
    shape = batch, query.shape[-2], *lengths, query.shape[-1]
    duration = price(*shape, bool(given["causal"]), dtype, key.shape[-2])
    duration = round(duration / costs.profile.attention.flash_share)
    return products.OperatorCost(f"flash_{'bwd' if backward else 'fwd'}_kernel_{dtype}", duration)


def _packed(call: products.Call, costs: KernelCosts, *, backward: bool) -> products.OperatorCost:
    """Price torch's attention of (tokens, heads, size), whose sequences are taken as equally long."""
    given = bind(call.func, call.args, call.kwargs)
    batch = len(given["cum_seq_q"]) - 1 if given["cum_seq_q"] is not None else len(given["query"])
    tensors = [
        given[name].new_empty(batch, given[name].shape[:-2].numel() // batch, *given[name].shape[-2:])
        for name in ("query", "query", "key", "value")
    ]
    causal = given["is_causal"] or given.get("window_size_right") == 0
    args = (*(tensor.transpose(1, 2) for tensor in tensors[not backward :]), causal)
    rule = products.attention_backward if backward else products.attention_forward
    return rule(call._replace(args=args, kwargs={}), costs, causal_at=len(args) - 1)


def _four_bits(call: products.Call, costs: KernelCosts) -> products.OperatorCost:
    """Price bitsandbytes' product with a weight of 4 bits: the weight is expanded, then multiplied."""
    given = bind(call.func, call.args, call.kwargs)
    a, n = given["A"], call.outs[0].shape[-1]
    m, k, dtype = a.numel() // a.shape[-1], a.shape[-1], compute_type(a.dtype)
    duration = costs.gemm_ns(m, n, k, 1, dtype) + costs.memory_bound_ns(n * k // 2, "pointwise")
    return products.OperatorCost(f"gemm_4bit_{m}x{n}x{k}", duration)


def _eight_bits(call: products.Call, costs: KernelCosts) -> products.OperatorCost:
    """Price bitsandbytes' product of int8 as one of bf16, whose rate every profile has."""
    a, b = call.args[0], call.args[1]
    m, k, n = a.numel() // a.shape[-1], a.shape[-1], b.shape[0]
    return products.OperatorCost(
        f"gemm_int8_{m}x{n}x{k}", costs.gemm_ns(m, n, k, 1, compute_type(torch.bfloat16))
    )


def _flex(call: products.Call, costs: KernelCosts, *, backward: bool) -> products.OperatorCost:
    """Price FlexAttention: by the share of the scores that the mask leaves."""
    query, key, value = call.args[:3]
    dtype = compute_type(query.dtype)
    rule = products.attention_backward if backward else products.attention_forward
    args = (query, query, key, value) if backward else (query, key, value)
    costs = KernelCosts(costs.profile.with_attention("flex"))
    dense = rule(call._replace(args=args, kwargs={}), costs, causal_at=99)
    duration = round(dense.duration_ns * call.args[-1])
    name = f"triton_flex_{'bwd' if backward else 'fwd'}_{dtype}"
    return products.OperatorCost(name, duration, dense.workspace_bytes)


_OF_KINDS = {
    "elementwise": memory.moves("pointwise"),
    "rows": memory.moves("reduction"),
    "optimizers": memory.moves("optimizer"),
}
_FLASH = ("", "_varlen")
OF_LIBRARIES: dict[str, products.Price] = {
    **{
        name: _OF_KINDS[kind]
        for kind, names in table_beside(__file__, "libraries.toml").items()
        for name in names
    },
    **dict.fromkeys(("bitsandbytes::gemm_4bit", "bitsandbytes::gemv_4bit"), _four_bits),
    **dict.fromkeys(("bitsandbytes::int8_linear_matmul", "bitsandbytes::int8_scaled_mm"), _eight_bits),
    "fsdpbench::flex_attention": partial(_flex, backward=False),
    "fsdpbench::flex_attention_backward": partial(_flex, backward=True),
    **{f"flash_attn::_flash_attn{kind}_forward": partial(_flash, backward=False) for kind in _FLASH},
    **{f"flash_attn::_flash_attn{kind}_backward": partial(_flash, backward=True) for kind in _FLASH},
}
"""Prices of kernels and operators of libraries, by their full names. Kernels of Triton are `triton::` and the
function's name; their bytes are those of their arguments, of which a kernel reads or writes each once."""
