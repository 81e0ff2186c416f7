"""Prices of matrix products and attention by their shape."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch

from fsdpbench.sim.model.kernel_costs import KernelCosts
from fsdpbench.sim.torch_device.flops import compute_type
from fsdpbench.sim.torch_device.strict.words import error_text

_SCALED = ("fp8", "nvfp4")
"""Dtypes of factors that were cast before the product, by operators with their own prices."""


_ODD = 2.7
"""Slow-down of 16-bit products with odd sizes, which have no kernel tuned for the chip (one H200)."""


def _gemm(a: torch.Tensor, b: torch.Tensor, costs: KernelCosts) -> "OperatorCost":
    """Return the cost of `a` (..., m, k) times `b` (..., k, n)."""
    m, k = a.shape[-2:]
    n = b.shape[-1]
    batch = prod(a.shape[:-2])
    dtype = compute_type(a.dtype)
    if a.dtype is torch.float4_e2m1fn_x2:  # two elements per byte
        k *= 2
    kind = "weight_grad" if _is_weight_gradient(a, b) else "forward"
    if not (m and n and k and batch):
        return OperatorCost(f"gemm_{dtype}", costs.memory_bound_ns(0))
    duration = costs.gemm_ns(m, n, k, batch, dtype, kind, comes_quantised=dtype in _SCALED)
    if a.element_size() == 2 and (n % 2 or k % 2) and min(n, k) > 1:  # vectors have separate kernels
        duration = round(duration * _ODD)
    name = f"gemm_{dtype}_{batch}x{m}x{n}x{k}" if batch > 1 else f"gemm_{dtype}_{m}x{n}x{k}"
    return OperatorCost(name, duration)


def _is_weight_gradient(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether this is `grad.t() @ input`, the only product of a linear layer with this transpose."""
    if a.dim() != 2 or min(a.shape) < 2 or min(b.shape) < 2:
        return False
    return a.stride(0) == 1 and a.stride(1) != 1 and b.stride(1) == 1


def product(first: int) -> "Price":
    """Return the rule for a matrix product of the arguments `first` and `first + 1`."""
    return lambda call, costs: _gemm(call.args[first], call.args[first + 1], costs)


def scaled(call: "Call", costs: KernelCosts) -> "OperatorCost":
    """Price a product in 8 or 4 bits. Raises `RuntimeError`, like CUDA, if the profile has none."""
    a, scales = call.args[0], argument(call, 2, "scale_a", None)
    first = scales[0] if isinstance(scales, (list, tuple)) else scales
    needed = compute_type(a.dtype)
    blocks = first is not None and first.dtype is torch.float8_e8m0fnu
    known = costs.profile.narrow_peak_flops
    # Chips with nvfp4 products are those that support block scales.
    if needed not in known or (blocks and "nvfp4" not in known):
        what = "mxfp8" if blocks else needed
        raise RuntimeError(error_text("products.no_table", costs.profile.name, what))
    return _gemm(a, call.args[1], costs)


def grouped(call: "Call", costs: KernelCosts) -> "OperatorCost":
    """Price `_grouped_mm`: one product per group in one kernel, with groups assumed equal.

    If one factor is two-dimensional, groups are in its rows (forward, and gradients of rows); if both are, in
    their columns (gradients of weights).
    """
    a, b = call.args[0], call.args[1]
    offsets = argument(call, 2, "offs", None)
    groups = offsets.shape[0] if offsets is not None else a.shape[0]
    m, k = a.shape[-2:]
    n = b.shape[-1]
    if a.dim() == 2 and b.dim() == 2:
        k //= groups
    elif a.dim() == 2:
        m //= groups
    elif b.dim() == 2:
        n //= groups
    dtype = compute_type(a.dtype)
    if not (m and n and k and groups):
        return OperatorCost(f"grouped_gemm_{dtype}", costs.memory_bound_ns(0))
    kind = "weight_grad" if a.dim() == 2 and b.dim() == 2 else "forward"
    name = f"grouped_gemm_{dtype}_{groups}x{m}x{n}x{k}"
    return OperatorCost(name, costs.gemm_ns(m, n, k, groups, dtype, kind))


def _attention_shape(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, with_keys: int, with_values: int
) -> tuple[int, int, int, int, int]:
    """Return (batch, heads, query length, key length, head size) of (batch, heads, length, size) tensors.

    If values have another head size, return the mean over products with queries or keys, and with values.
    """
    size = query.shape[3]
    if value.shape[3] != size:
        size = (with_keys * size + with_values * value.shape[3]) // (with_keys + with_values)
    return query.shape[0], query.shape[1], query.shape[2], key.shape[2], size


def _with_bias(duration: int, args: Sequence[Any], bias_at: int | None, costs: KernelCosts) -> int:
    """Return ns of the memory-efficient kernel, if it accepts a bias, plus the time to read the bias."""
    if bias_at is None:
        return duration
    bias = args[bias_at] if bias_at < len(args) else None
    read = costs.memory_bound_ns(tensor_bytes(bias)) if isinstance(bias, torch.Tensor) else 0
    return round(duration / costs.profile.attention.efficient_share) + read


def attention_forward(
    call: "Call", costs: KernelCosts, *, causal_at: int, bias_at: int | None = None
) -> "OperatorCost":
    """Price fused attention; `causal_at` and `bias_at` are the positions of these arguments."""
    query, key, value = call.args[:3]
    causal = bool(argument(call, causal_at, "is_causal", False))
    dtype = compute_type(query.dtype)
    shape = _attention_shape(query, key, value, 1, 1)
    duration = costs.attention_forward_ns(*shape, causal, dtype, key.shape[1])
    return OperatorCost(f"flash_fwd_kernel_{dtype}", _with_bias(duration, call.args, bias_at, costs))


def attention_backward(
    call: "Call", costs: KernelCosts, *, causal_at: int, bias_at: int | None = None
) -> "OperatorCost":
    """Price the backward of fused attention with workspaces; `causal_at`, `bias_at` as in forward."""
    query, key, value = call.args[1:4]
    causal = bool(argument(call, causal_at, "is_causal", False))
    dtype = compute_type(query.dtype)
    shape = _attention_shape(query, key, value, 3, 2)
    duration = costs.attention_backward_ns(*shape, causal, dtype, key.shape[1])
    duration = _with_bias(duration, call.args, bias_at, costs)
    return OperatorCost(f"flash_bwd_kernel_{dtype}", duration, _backward_workspace(query, key))


def _backward_workspace(query: torch.Tensor, key: torch.Tensor) -> tuple[int, ...]:
    """Return the workspace bytes of flash attention's backward.

    These are row sums, the query gradient in float32 (lengths rounded to 128, head size to 32), and with
    grouped queries expanded gradients of keys and values.
    """
    batch, heads, length, size = query.shape
    kv_length = key.shape[2]
    rounded = -(-length // 128) * 128
    wide = -(-size // 32) * 32 if size <= 192 else 256
    sizes = [batch * heads * rounded * 4, batch * heads * rounded * wide * 4]
    if key.shape[1] != heads:
        sizes += [batch * heads * kv_length * size * query.element_size()] * 2
    return tuple(sizes)


class Call(NamedTuple):
    """A call on meta tensors: the operator overload, its arguments and its outputs."""

    func: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    outs: Sequence[torch.Tensor]


@dataclass(frozen=True)
class OperatorCost:
    """Price of a call: kernel name, duration in ns, workspace bytes, and whether it is a guess.

    `nbytes`: bytes that memory-bound kernels read and write; 0 for products and attention.
    """

    kernel: str
    duration_ns: int
    workspace_bytes: tuple[int, ...] = ()
    unknown: bool = False
    nbytes: int = 0


Price = Callable[[Call, KernelCosts], OperatorCost]
FREE = OperatorCost("", 0)


def argument(call: Call, index: int, name: str, default: Any) -> Any:
    """Return an argument that was passed by position or by name."""
    if index < len(call.args):
        return call.args[index]
    return call.kwargs.get(name, default)


def operator_name(func: Any) -> str:
    """Return an operator's name without its namespace: `addmm` for `aten::addmm.out`."""
    return str(func._schema.name.split("::", 1)[1])


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's distinct elements: expanded (stride 0) dimensions count once."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride != 0 or size == 0:
            elements *= size
    return elements * tensor.element_size()
