"""Tensors that have no memory of their own: a `DTensor`, and classes that wrap others in their own way."""

from __future__ import annotations

from collections.abc import Iterator

import torch


def with_memory(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors inside one that wraps others; any other tensor as it is."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    for name in flatten()[0]:
        part = getattr(tensor, name)
        if isinstance(part, torch.Tensor):
            yield from with_memory(part)
