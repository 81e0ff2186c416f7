"""Casts to 8 and 4 bits by brute force: the nearest of all numbers of a format, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX, E2M1_MAX = 448.0, 6.0
_E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def numbers_of(dtype: torch.dtype) -> Tensor:
    """All finite numbers of an 8-bit format."""
    every = torch.arange(256, dtype=torch.uint8).view(dtype).to(torch.float64)
    return every[every.isfinite()].unique()


E2M1 = torch.tensor(sorted({sign * level for level in _E2M1 for sign in (1, -1)}), dtype=torch.float64)


def nearest(x: Tensor, numbers: Tensor) -> Tensor:
    """The nearest number to each element (ties do not occur in random data)."""
    return numbers[(x.double()[..., None] - numbers).abs().argmin(-1)]


def by_tensor(x: Tensor, dtype: torch.dtype) -> Tensor:
    """One scale for all."""
    scale = numbers_of(dtype).max() / x.double().abs().max()
    return nearest(x.double() * scale, numbers_of(dtype)) / scale


def mxfp8(x: Tensor) -> Tensor:
    """Blocks of 32 along rows: the least power of two with which nothing exceeds the format."""
    out = torch.empty_like(x, dtype=torch.float64)
    for row in range(x.shape[0]):
        for start in range(0, x.shape[1], 32):
            block = x[row, start : start + 32].double()
            scale = 2.0**-30
            while block.abs().max() / scale > E4M3_MAX:
                scale *= 2
            out[row, start : start + 32] = nearest(block / scale, numbers_of(torch.float8_e4m3fn)) * scale
    return out


def nvfp4(x: Tensor, square: bool = False) -> Tensor:
    """Blocks of 16 along rows (or of 16 x 16): a scale in e4m3 that is itself scaled by the tensor's."""
    out = torch.empty_like(x, dtype=torch.float64)
    whole = x.double().abs().max() / (E4M3_MAX * E2M1_MAX)
    height = 16 if square else 1
    for row in range(0, x.shape[0], height):
        for start in range(0, x.shape[1], 16):
            block = x[row : row + height, start : start + 16].double()
            wanted = block.abs().max() / E2M1_MAX / whole
            scale = nearest(wanted.reshape(1), numbers_of(torch.float8_e4m3fn)) * whole
            fitting = (block / scale).clamp(-E2M1_MAX, E2M1_MAX)
            out[row : row + height, start : start + 16] = nearest(fitting, E2M1) * scale
    return out


def turned(x: Tensor, signs: tuple[int, ...]) -> Tensor:
    """Rows with every 16 elements times signs and the Hadamard matrix, whose entry counts common bits."""
    matrix = [[(-1) ** (i & j).bit_count() / 4 for j in range(16)] for i in range(16)]
    blocks = x.double().unflatten(1, (-1, 16)) * torch.tensor(signs)
    return (blocks @ torch.tensor(matrix, dtype=torch.float64)).flatten(1)
