"""Products in fp8 with one scale a tensor, found again for each cast ("dynamic tensorwise").

The recipe of torchao's `Float8Linear` (its default `Float8LinearConfig`; formats after Micikevicius et al.
2022, arXiv 2209.05433: e4m3 for what is computed with, e5m2 for gradients, whose range is wider)::

    forward           y  = x8 @ w8^T      x8, w8 in e4m3
    input's gradient  dx = g8 @ w8        g8 in e5m2; w8 copied, stored by columns
    weight's gradient dw = g8^T @ x8      g8 copied transposed, x8 copied, stored by columns

`torch._scaled_mm` takes its first factor stored by rows and its second by columns, and nothing else: hence
the copies. `x` itself is kept for backward, which layers that read the same tensor share; it is cast again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16
"""Both sizes of a layer and the number of tokens must divide by it, as `torch._scaled_mm` demands."""
_SMALLEST = 1e-12


class EightBits(NamedTuple):
    """A matrix in fp8, and the scalar in float32 by which its elements are multiplied."""

    data: Tensor
    inverse: Tensor


def scale_of(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the factor in float32 that brings the largest magnitude to the largest number of `dtype`."""
    # In float64, as torchao has it: compiled and eager divisions in float32 differ.
    return (torch.finfo(dtype).max / amax.to(torch.float64).clamp(min=_SMALLEST)).to(torch.float32)


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `x * scale` in fp8, finite."""
    most = torch.finfo(dtype).max
    return (x.to(torch.float32) * scale).clamp(min=-most, max=most).to(dtype)


def quantise(x: Tensor, dtype: torch.dtype) -> EightBits:
    """Return `x` in fp8, scaled by its own largest magnitude."""
    scale = scale_of(x.abs().max(), dtype)
    return EightBits(cast(x, scale, dtype), scale.reciprocal())


def product(a: EightBits, b: EightBits, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """Return `a @ b` in `dtype`. `fast`: the tensor cores' sums are not promoted (forward alone)."""
    left, right = a.data.contiguous(), b.data
    if right.stride(0) != 1:
        right = right.t().contiguous().t()
    scaled: Tensor = torch.ops.aten._scaled_mm.default(
        left, right, a.inverse, b.inverse, out_dtype=dtype, use_fast_accum=fast
    )
    return scaled


class EightBitLinear(torch.autograd.Function):
    """The product `x @ w^T` of x, [..., in], and w, [out, in], which is cast here or was gathered in fp8."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        w8 = _of_weight(weight)
        y = product(quantise(rows_of(x), E4M3), EightBits(w8.data.t(), w8.inverse), x.dtype, fast=True)
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        g8 = quantise(rows_of(gradient), E5M2)
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = product(g8, _of_weight(weight), gradient.dtype).view(x.shape)
        if ctx.needs_input_grad[1]:
            turned = EightBits(g8.data.t(), g8.inverse)
            of_weight = product(turned, quantise(rows_of(x), E4M3), gradient.dtype)
        return of_x, of_weight


def _of_weight(weight: Tensor) -> EightBits:
    data = getattr(weight, "data8", None)  # gathered in fp8 (`systems/narrow.py`)
    return quantise(weight, E4M3) if data is None else EightBits(data, weight.inverse8)  # type: ignore[attr-defined]


def rows_of(x: Tensor) -> Tensor:
    """Return x, [..., n], as [rows, n]."""
    return x.reshape(-1, x.shape[-1])
