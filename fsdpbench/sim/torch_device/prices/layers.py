"""Prices of convolutions and norms, whose kernels are limited by more than products or bytes.

Figures without another source were measured on one H200 with torch 2.11 (ci/measured/gpu/h200).
"""

from math import gcd, prod

import torch

from fsdpbench.sim.model.kernel_costs import KernelCosts
from fsdpbench.sim.torch_device.flops import compute_type
from fsdpbench.sim.torch_device.prices.memory import at_least, moves
from fsdpbench.sim.torch_device.prices.products import Call, OperatorCost, argument, tensor_bytes
from fsdpbench.sim.torch_device.strict.words import bind

# Time of cuDNN's kernels relative to products of the same shape, by alignment of a group's channels; for few
# channels and for its older kernels, the share of the float32 rate.
_ALIGNED, _ENGINES, _FEW_CHANNELS = 64, 16, 8
_UNALIGNED = 1.6
_PADDED_SHARE, _OLD_SHARE = 0.4, 0.27
# From this number of pixels on, a product reads images directly, channels first.
_PIXELS = 1024


def _product(
    weight: torch.Tensor, x: torch.Tensor, y: torch.Tensor, groups: int, transposed: bool
) -> tuple[int, int, int]:
    """Return the implicit product (m, n, k) of one group; a transposed one swaps roles with its gradient."""
    small, n, k = x if transposed else y, weight.shape[0] // groups, prod(weight.shape[1:])
    return small.shape[0] * prod(small.shape[2:]), *((k, n) if transposed else (n, k))


def _is_uncertain(weight: torch.Tensor, groups: int) -> bool:
    """Return whether cuDNN computes weight gradients of some such shapes without tensor cores."""
    alignment = gcd(weight.shape[1], weight.shape[0] // groups)
    return groups > 1 and alignment % _ENGINES > 0 and weight.element_size() == 2


def _nanoseconds(
    costs: KernelCosts, product: tuple[int, int, int], kind: str, groups: int, *tensors: torch.Tensor
) -> float:
    """Return ns of a convolution's `product` and of copies to channels last; `tensors`: weight, x, y."""
    weight, x, y = tensors
    found: float = costs.gemm_ns(*product, groups, compute_type(x.dtype, convolution=True), kind)
    slowly = 2e9 * groups * prod(product) / costs.profile.peak_flops["fp32"]
    alignment, pixels = gcd(weight.shape[1], weight.shape[0] // groups), prod(y.shape[2:])
    if weight.shape[1] < _FEW_CHANNELS:
        return max(found, slowly / _PADDED_SHARE) if groups == 1 else found
    if prod(weight.shape[2:]) == 1 and pixels >= _PIXELS:
        return found
    found *= _UNALIGNED if alignment % _ALIGNED else 1.0
    if kind == "weight_grad" and _is_uncertain(weight, groups):  # the mean of both kernels
        found = (found + max(found, slowly / _OLD_SHARE)) / 2
    if pixels > 1 and x.element_size() == 2 and x.is_contiguous():
        found += sum(costs.memory_bound_ns(3 * tensor_bytes(each), "reduction") for each in (x, y))
    return found


def convolution(call: Call, costs: KernelCosts) -> OperatorCost:
    """Price a convolution like its matrix products."""
    x, weight, y = *call.args[:2], call.outs[0]
    groups = argument(call, 8, "groups", 1)
    m, n, k = _product(weight, x, y, groups, argument(call, 6, "transposed", False))
    name = f"conv_fprop_{compute_type(x.dtype, convolution=True)}_{groups}x{m}x{n}x{k}"
    return OperatorCost(name, round(_nanoseconds(costs, (m, n, k), "forward", groups, weight, x, y)))


def convolution_backward(call: Call, costs: KernelCosts) -> OperatorCost:
    """Price a convolution's backward: products for input and weight, a sum for the bias, if requested."""
    grad, x, weight = call.args[:3]
    groups = argument(call, 9, "groups", 1)
    wants_input, wants_weight, wants_bias = argument(call, 10, "output_mask", (True, True, True))
    m, n, k = _product(weight, x, grad, groups, argument(call, 7, "transposed", False))
    tensors = weight, x, grad
    ns = _nanoseconds(costs, (m, k, n), "forward", groups, *tensors) if wants_input else 0
    ns += _nanoseconds(costs, (n, k, m), "weight_grad", groups, *tensors) if wants_weight else 0
    ns += costs.memory_bound_ns(tensor_bytes(grad), "reduction") if wants_bias else 0
    name = f"conv_bprop_{compute_type(x.dtype, convolution=True)}_{groups}x{m}x{n}x{k}"
    return OperatorCost(name, round(ns), unknown=bool(wants_weight) and _is_uncertain(weight, groups))


# Instructions per element: a division in each step of Welford's mean and variance; in backward two sums,
# which share their loads if channels are last.
_STATISTICS, _GRADIENTS, _GRADIENTS_LAST = 115, 180, 85
_A_BLOCK = 0.6
"""Share of a multiprocessor that one block, which handles one channel, keeps busy."""
# Each row has a block of four warps, which sum through shuffles and shared memory.
_THREADS_A_ROW, _A_ROW, _A_ROW_BACKWARD = 128, 286, 155
# Up to this number of rows, one block of the weight gradient processes all rows, with this many ns each.
_ROWS_OF_ONE_BLOCK, _A_ROW_OF_ONE_BLOCK_NS = 65536, 4.0
_FORWARD, _BACKWARD = moves("reduction"), moves("reduction", reread=True)


def batch_norm(call: Call, costs: KernelCosts) -> OperatorCost:
    """Price batch norm in 16 bits (training and backward) as sums plus the result; others by bytes.

    Each channel is summed by one block, or by several if channels are last.
    """
    backward = "backward" in call.func._schema.name
    found, x = _FORWARD(call, costs), call.args[backward]
    training = backward or bind(call.func, call.args, call.kwargs).get("training", True)
    if x.dim() < 3 or x.element_size() != 2 or not training:
        return found
    alone = max(1.0, costs.profile.sm_count / (_A_BLOCK * x.shape[1])) if x.is_contiguous() else 1.0
    sums = (_GRADIENTS if x.is_contiguous() else _GRADIENTS_LAST) if backward else _STATISTICS
    written = 0 if backward else costs.memory_bound_ns(2 * tensor_bytes(x))
    return at_least(found, costs.issued_ns(x.numel() * alone, sums) + written)


def layer_norm(call: Call, costs: KernelCosts) -> OperatorCost:
    """Price a layer norm or its backward by bytes or by rows, whichever takes longer."""
    backward = "backward" in call.func._schema.name
    rows = call.args[backward].numel() // max(1, prod(call.args[1 + backward]))
    limit = costs.issued_ns(rows * _THREADS_A_ROW, _A_ROW_BACKWARD if backward else _A_ROW)
    if backward and rows <= _ROWS_OF_ONE_BLOCK:
        limit += round(rows * _A_ROW_OF_ONE_BLOCK_NS)
    return at_least((_BACKWARD if backward else _FORWARD)(call, costs), limit)
