"""Matrix products and convolutions: priced by their shape."""

from __future__ import annotations

from math import prod

import torch

from fsdpbench.configuration.compute_type import compute_type
from fsdpbench.sim.costs import KernelCosts
from fsdpbench.sim.prices.call import Call, OperatorCost, Price, argument, tensor_bytes

_SCALED = ("fp8", "nvfp4")
"""Torch's products in these take factors that were cast before, by operators with prices of their own."""


def _gemm(a: torch.Tensor, b: torch.Tensor, costs: KernelCosts) -> OperatorCost:
    """``a`` (..., m, k) times ``b`` (..., k, n)."""
    m, k = a.shape[-2:]
    n = b.shape[-1]
    batch = prod(a.shape[:-2])
    dtype = compute_type(a.dtype)
    if a.dtype is torch.float4_e2m1fn_x2:  # two elements a byte
        k *= 2
    kind = "weight_grad" if _is_weight_gradient(a, b) else "forward"
    if not (m and n and k and batch):
        return OperatorCost(f"gemm_{dtype}", costs.memory_bound_ns(0))
    return OperatorCost(
        f"gemm_{dtype}_{batch}x{m}x{n}x{k}" if batch > 1 else f"gemm_{dtype}_{m}x{n}x{k}",
        costs.gemm_ns(m, n, k, batch, dtype, kind, comes_quantised=dtype in _SCALED),
    )


def _is_weight_gradient(a: torch.Tensor, b: torch.Tensor) -> bool:
    """``grad.t() @ input``: a linear layer's only product whose first factor alone is stored transposed."""
    if a.dim() != 2 or min(a.shape) < 2 or min(b.shape) < 2:
        return False
    return a.stride(0) == 1 and a.stride(1) != 1 and b.stride(1) == 1


def product(first: int) -> Price:
    """A matrix product whose factors are arguments ``first`` and ``first + 1``."""
    return lambda call, costs: _gemm(call.args[first], call.args[first + 1], costs)


def scaled(call: Call, costs: KernelCosts) -> OperatorCost:
    """A product in 8 or 4 bits; raises RuntimeError where the profile knows none, as CUDA does."""
    a, scales = call.args[0], argument(call, 2, "scale_a", None)
    first = scales[0] if isinstance(scales, (list, tuple)) else scales
    needed = compute_type(a.dtype)
    blocks = first is not None and first.dtype is torch.float8_e8m0fnu
    known = costs.profile.narrow_peak_flops
    # Chips that multiply in nvfp4 are those that take scales of blocks.
    if needed not in known or (blocks and "nvfp4" not in known):
        what = "mxfp8" if blocks else needed
        raise RuntimeError(
            f"torch._scaled_mm: the GPU of profile {costs.profile.name} has no products in {what} (no table "
            "in its profile): --hardware b200 has fp8, mxfp8 and nvfp4, h100-80gb fp8"
        )
    return _gemm(a, call.args[1], costs)


def grouped(call: Call, costs: KernelCosts) -> OperatorCost:
    """`_grouped_mm`: a product a group in one kernel, groups taken to be equal. One factor of two dimensions
    is group by group in rows (forward, and gradients of rows), both in columns (gradients of weights)."""
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


def _convolution_gemm(
    x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, groups: int
) -> tuple[int, int, int]:
    """The implicit product (m, n, k) of one group."""
    return y.shape[0] * prod(y.shape[2:]), weight.shape[0] // groups, prod(weight.shape[1:])


def convolution(call: Call, costs: KernelCosts) -> OperatorCost:
    """A convolution, as the matrix products it amounts to."""
    args, outs = call.args, call.outs
    groups = argument(call, 8, "groups", 1)
    x, weight = args[0], args[1]
    if argument(call, 6, "transposed", False):
        m, n, k = x.shape[0] * prod(x.shape[2:]), prod(weight.shape[1:]), weight.shape[0] // groups
    else:
        m, n, k = _convolution_gemm(x, weight, outs[0], groups)
    dtype = compute_type(x.dtype, convolution=True)
    return OperatorCost(f"conv_fprop_{dtype}_{groups}x{m}x{n}x{k}", costs.gemm_ns(m, n, k, groups, dtype))


def convolution_backward(call: Call, costs: KernelCosts) -> OperatorCost:
    """Its backward: a product for the input, one for the weight, a sum for the bias, as they are required."""
    args = call.args
    grad, x, weight = args[0], args[1], args[2]
    groups = argument(call, 9, "groups", 1)
    wants_input, wants_weight, wants_bias = argument(call, 10, "output_mask", (True, True, True))
    m, n, k = _convolution_gemm(x, weight, grad, groups)
    dtype = compute_type(x.dtype, convolution=True)
    duration = costs.gemm_ns(m, k, n, groups, dtype) if wants_input else 0
    duration += costs.gemm_ns(n, k, m, groups, dtype, "weight_grad") if wants_weight else 0
    duration += costs.memory_bound_ns(tensor_bytes(grad), "reduction") if wants_bias else 0
    return OperatorCost(f"conv_bprop_{dtype}_{groups}x{m}x{n}x{k}", duration)
