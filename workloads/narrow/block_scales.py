"""Matrices whose elements share a scale in blocks along the dimension that a product sums over.

    mxfp8   32 elements in e4m3, scale 2^n in e8m0     OCP Microscaling Formats 1.0; n rounded up, so that
                                                       nothing saturates (Mishra 2025, arXiv 2506.08027)
    nvfp4   16 elements in e2m1, scale in e4m3         and one in float32 a tensor: the largest magnitude
                                                       over 448 x 6 (NVIDIA 2025, arXiv 2509.25149)

Each cast is one operator, as libraries have one kernel for it: it reads the matrix and writes it and its
scales, padded to the 128 rows and 4 scales a row that the products want. A real kernel also swizzles scales
inside these tiles, which moves no more bytes; here they are in order, for products that are emulated.

Of nvfp4's gradients: what is summed over tokens is rotated before (a Hadamard matrix of 16 x 16 with fixed
signs, which spreads outliers and leaves the product as it is), and gradients of outputs are rounded
stochastically.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

MX_BLOCK, NV_BLOCK = 32, 16
_E4M3_MAX, _E2M1_MAX = 448.0, 6.0
_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
_TILE_ROWS, _TILE_SCALES = 128, 4
_SMALLEST = 1e-30


def mxfp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """[m, k] in e4m3 and its scales in e8m0, a block of a row each."""
    blocks = x.float().unflatten(1, (-1, MX_BLOCK))
    amax = blocks.abs().amax(dim=-1, keepdim=True).clamp(min=_SMALLEST)
    scale = torch.exp2(torch.ceil(torch.log2(amax / _E4M3_MAX)))
    data = (blocks / scale).clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn)
    return data.flatten(1), _padded(scale.squeeze(-1).to(torch.float8_e8m0fnu))


def _mxfp8_shapes(x: Tensor) -> tuple[Tensor, Tensor]:
    m, k = x.shape
    scales = x.new_empty(_tiles(m, k // MX_BLOCK), dtype=torch.float8_e8m0fnu)
    return x.new_empty((m, k), dtype=torch.float8_e4m3fn), scales


def nvfp4(
    x: Tensor, amax: Tensor, square: bool = False, noise: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """[m, k] in e2m1, two a byte, and its scales in e4m3; `amax` is the largest magnitude.

    `square`: blocks of 16 x 16 share a scale, so that the transposed matrix is cast to the same numbers.
    `noise`, [m, k] in [0, 1): round up where it is below the place between two levels.
    """
    blocks = x.float().unflatten(1, (-1, NV_BLOCK))
    most = blocks.abs().amax(dim=-1)
    if square:
        most = most.unflatten(0, (-1, NV_BLOCK)).amax(dim=1).repeat_interleave(NV_BLOCK, 0)
    whole = nvfp4_factor(amax)
    scale = (most / _E2M1_MAX / whole).clamp(_SMALLEST, _E4M3_MAX).to(torch.float8_e4m3fn)
    factor = (scale.float() * whole)[..., None]
    wanted = torch.where(factor > 0, blocks / factor, 0).flatten(1)
    numbers = _rounded(wanted.abs().clamp(max=_E2M1_MAX), noise) + 8 * (wanted < 0)
    packed = (numbers[:, ::2] + 16 * numbers[:, 1::2]).to(torch.uint8)
    return packed.view(torch.float4_e2m1fn_x2), _padded(scale)


def nvfp4_factor(amax: Tensor) -> Tensor:
    """The scale of the whole tensor, in float32."""
    return amax.float().clamp(min=_SMALLEST) / (_E4M3_MAX * _E2M1_MAX)


def _rounded(magnitudes: Tensor, noise: Tensor | None) -> Tensor:
    """Numbers of the levels: the nearest, an even one of two that are as near, or a drawn one."""
    levels = torch.tensor(_LEVELS)
    if noise is not None:
        low = (torch.bucketize(magnitudes, levels, right=True) - 1).clamp(max=len(_LEVELS) - 2)
        place = (magnitudes - levels[low]) / (levels[low + 1] - levels[low])
        return low + (noise < place)
    found = torch.zeros_like(magnitudes, dtype=torch.int64)
    for index, middle in enumerate(((levels[1:] + levels[:-1]) / 2).tolist()):
        found += magnitudes >= middle if index % 2 else magnitudes > middle
    return found


def rotated(x: Tensor) -> Tensor:
    """Rows of x, [m, k], with every 16 elements rotated, in float32."""
    hadamard = torch.ones(1, 1)
    for _ in range(4):
        hadamard = torch.cat((torch.cat((hadamard, hadamard), 1), torch.cat((hadamard, -hadamard), 1)))
    return ((x.float().unflatten(1, (-1, 16)) * torch.tensor(_SIGNS)) @ hadamard / 4).flatten(1)


def dequantised(data: Tensor, scales: Tensor) -> Tensor:
    """The matrix in float32, without the scale of a whole tensor."""
    if data.dtype is torch.float4_e2m1fn_x2:
        packed = data.view(torch.uint8).int()
        numbers = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
        values, block = torch.tensor(_LEVELS)[numbers & 7] * (1 - 2 * (numbers >> 3)), NV_BLOCK
    else:
        values, block = data.float(), MX_BLOCK
    rows, count = len(values), values.shape[1] // block
    factors = scales.float()[:rows, :count, None]
    return (values.unflatten(1, (-1, block)) * factors).flatten(1)


def _tiles(rows: int, scales: int) -> tuple[int, int]:
    return math.ceil(rows / _TILE_ROWS) * _TILE_ROWS, math.ceil(scales / _TILE_SCALES) * _TILE_SCALES


def _padded(scales: Tensor) -> Tensor:
    padded = torch.zeros(_tiles(*scales.shape), dtype=torch.uint8)
    padded[: scales.shape[0], : scales.shape[1]] = scales.view(torch.uint8)
    return padded.view(scales.dtype)


# ---------------------------------------------------------------------------------------- the operators


def _nvfp4_amax(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.abs().amax().float(), rotated(x.t()).abs().amax()


def _nvfp4_both(
    x: Tensor, by_rows: Tensor, by_columns: Tensor, stochastic: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    noise = [torch.rand(shape) if stochastic else None for shape in (x.shape, x.t().shape)]
    turned = rotated(x.t())
    return *nvfp4(x, by_rows, noise=noise[0]), *nvfp4(turned, by_columns, noise=noise[1])


def _nvfp4_weight(w: Tensor, amax: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return *nvfp4(w, amax, square=True), *nvfp4(w.t(), amax, square=True)


def _nvfp4_both_shapes(x: Tensor, *others: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def of(rows: int, columns: int) -> tuple[Tensor, Tensor]:
        scales = x.new_empty(_tiles(rows, columns // NV_BLOCK), dtype=torch.float8_e4m3fn)
        return x.new_empty((rows, columns // 2), dtype=torch.float4_e2m1fn_x2), scales

    return *of(*x.shape), *of(*x.t().shape)


_LIBRARY = torch.library.Library("fsdpbench_workloads", "FRAGMENT")
for _schema, _run, _shapes in (
    ("mxfp8_rows(Tensor x) -> (Tensor, Tensor)", mxfp8, _mxfp8_shapes),
    (
        "mxfp8_columns(Tensor x) -> (Tensor, Tensor)",
        lambda x: mxfp8(x.t()),
        lambda x: _mxfp8_shapes(x.t()),
    ),
    (
        "nvfp4_amax(Tensor x) -> (Tensor, Tensor)",
        _nvfp4_amax,
        lambda x: tuple(x.new_empty((), dtype=torch.float32) for _ in range(2)),
    ),
    (
        "nvfp4_both(Tensor x, Tensor by_rows, Tensor by_columns, bool stochastic) "
        "-> (Tensor, Tensor, Tensor, Tensor)",
        _nvfp4_both,
        _nvfp4_both_shapes,
    ),
    (
        "nvfp4_weight(Tensor w, Tensor amax) -> (Tensor, Tensor, Tensor, Tensor)",
        _nvfp4_weight,
        _nvfp4_both_shapes,
    ),
):
    _LIBRARY.define(_schema)
    _LIBRARY.impl(_schema.split("(")[0], _run, "CPU")
    _LIBRARY.impl(_schema.split("(")[0], _shapes, "Meta")
