"""Gradients of `x @ w^T`, of which a recipe knows how each product is cast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Product = Callable[[Any, Tensor, torch.dtype], Tensor]


def rows_of(x: Tensor) -> Tensor:
    """[..., n] as [rows, n]."""
    return x.reshape(-1, x.shape[-1])


def gradients(
    wanted: Sequence[bool],
    x: Tensor,
    weight: Tensor,
    gradient: Any,
    dtype: torch.dtype,
    of_x: Product,
    of_weight: Product,
) -> tuple[Tensor | None, Tensor | None]:
    """Of x, [..., in], and of the weight, [out, in], where they are `wanted`.

    `gradient`: what the recipe has made of the output's, [rows, out]; the products take it first. `of_x`: of
    it and the weight. `of_weight`: of it and the rows of x.
    """
    first = of_x(gradient, weight, dtype).view(x.shape) if wanted[0] else None
    second = of_weight(gradient, rows_of(x), dtype) if wanted[1] else None
    return first, second
