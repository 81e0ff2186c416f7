"""Gradients as the copy into a reduction's input wants them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...shared.copy_in import copy_in
from ...shared.layout import UnitLayout


def rank_major(
    layout: UnitLayout, which: Sequence[int], gradients: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The same, one rank's part after the other where a parameter is cut on another dim than the first."""
    dims = [layout.segments[index].dim for index in which]
    return [
        torch.cat(gradient.chunk(layout.world_size, dim)) if dim and layout.rank_major else gradient
        for gradient, dim in zip(gradients, dims, strict=True)
    ]


def fill_missing(
    layout: UnitLayout, which: Sequence[int], gradients: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Gradients of all the unit's parameters, zeros where there is none."""
    given = dict(zip(which, gradients, strict=True))
    like = gradients[0]
    return [
        given[i] if i in given else torch.zeros(segment.shape, dtype=like.dtype, device=like.device)
        for i, segment in enumerate(layout.segments)
    ]


def prepares(layout: UnitLayout, which: Sequence[int]) -> bool:
    """Whether gradients of the parameters ``which`` have to be prepared."""
    missing = layout.whole and len(which) < len(layout.segments)
    return missing or layout.interleaved or layout.has_scalars


def prepare(layout: UnitLayout, which: Sequence[int], gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same gradients, with zeros for those that are missing, rank-major, and none without dimensions."""
    if layout.whole and len(which) < len(layout.segments):
        gradients = fill_missing(layout, which, gradients)
    if layout.interleaved:
        gradients = rank_major(layout, which, gradients)
    if layout.has_scalars:
        gradients = [gradient.view(-1) for gradient in gradients]
    return gradients


def concatenate(layout: UnitLayout, gradients: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Copy them into ``out`` of (ranks, elements of a rank), and cast them to its dtype."""
    if layout.has_empty:  # copy_in refuses them
        gradients = [gradient for gradient in gradients if gradient.numel()]
    if gradients:
        copy_in(gradients, out)
