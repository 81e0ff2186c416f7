"""Linear layers in mxfp8 and nvfp4: what is cast when, for the product and for both gradients.

    mxfp8   torchao's MXFP8 training linear: six casts, of each matrix along the dimension that is summed
            over; input and weight are kept in 16 bits and cast again in backward
    nvfp4   torchao's NVFP4 training linear (prototype): all three products in 4 bits; one kernel casts a
            matrix both ways; the casts of forward are kept for backward instead of the input

Where the CPU has no such product, it multiplies what the numbers stand for, in float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

from fsdpbench.workloads.narrow import block_scales
from fsdpbench.workloads.narrow.eight_bits import gradients, rows_of

_ops: Any = torch.ops.fsdpbench_workloads


class Blocks(NamedTuple):
    """[rows, summed over], its scales, and the scale of all of it where there is one."""

    data: Tensor
    scales: Tensor
    whole: Tensor | None = None


def product(a: Blocks, b: Blocks, dtype: torch.dtype) -> Tensor:
    """`a @ b^T`."""
    if a.data.device.type == "cpu":
        return _emulated(a, b).to(dtype)
    if a.whole is None or b.whole is None:
        both = (a.data, b.data.t(), a.scales, b.scales)
        product_of_both: Tensor = torch.ops.aten._scaled_mm.default(*both, out_dtype=dtype)
        return product_of_both
    kinds = [ScalingType.BlockWise1x16, ScalingType.TensorWise]
    swizzles = [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE]
    return scaled_mm(
        a.data,
        b.data.t(),
        [a.scales, a.whole],
        kinds,
        [b.scales, b.whole],
        kinds,
        swizzles,
        swizzles,
        output_dtype=dtype,
    )


def _emulated(a: Blocks, b: Blocks) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        result = block_scales.dequantised(*a[:2]) @ block_scales.dequantised(*b[:2]).t()
    for whole in (a.whole, b.whole):
        result = result if whole is None else result * whole
    return result


class MxLinear(torch.autograd.Function):
    """`x @ w^T` of x, [..., in], and a weight, [out, in], in mxfp8."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        rows = rows_of(x)
        y = product(Blocks(*_ops.mxfp8_rows(rows)), Blocks(*_ops.mxfp8_rows(weight)), x.dtype)
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        rows = rows_of(gradient)
        return gradients(ctx.needs_input_grad, x, weight, rows, gradient.dtype, _mx_of_x, _mx_of_weight)


def _mx_of_x(rows: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    w = Blocks(*_ops.mxfp8_columns(weight))
    return product(Blocks(*_ops.mxfp8_rows(rows)), w, dtype)


def _mx_of_weight(rows: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    read = Blocks(*_ops.mxfp8_columns(x))
    return product(Blocks(*_ops.mxfp8_columns(rows)), read, dtype)


class Nvfp4Linear(torch.autograd.Function):
    """`x @ w^T` of x, [..., in], and a weight, [out, in], in nvfp4."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        by_rows, by_columns = _both(rows_of(x), stochastic=False)
        amax = weight.abs().max().float()
        data, scales, turned, turned_scales = _ops.nvfp4_weight(weight, amax)
        whole = block_scales.nvfp4_factor(amax)
        assert by_columns.whole is not None
        ctx.save_for_backward(*by_columns, turned, turned_scales, whole)
        ctx.shape = x.shape
        return product(by_rows, Blocks(data, scales, whole), x.dtype).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        saved = ctx.saved_tensors
        by_rows, by_columns = _both(rows_of(gradient), stochastic=True)
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = product(by_rows, Blocks(*saved[3:]), gradient.dtype).view(ctx.shape)
        if ctx.needs_input_grad[1]:
            of_weight = product(by_columns, Blocks(*saved[:3]), gradient.dtype)
        return of_x, of_weight


def _both(x: Tensor, stochastic: bool) -> tuple[Blocks, Blocks]:
    """`x` for products that sum over its columns, and, rotated, for those that sum over its rows."""
    amax = _ops.nvfp4_amax(x)
    data, scales, turned, turned_scales = _ops.nvfp4_both(x, *amax, stochastic)
    whole = [block_scales.nvfp4_factor(each) for each in amax]
    return Blocks(data, scales, whole[0]), Blocks(turned, turned_scales, whole[1])
