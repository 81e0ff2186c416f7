"""Which memory of the host is pinned: copies of it run beside the CPU, copies of all other hold it up.

Host tensors are torch's own, from its CPU allocator; that one is pinned is a mark on its storage.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

_MARK = "_sim_pinned"


def pin(tensor: torch.Tensor) -> torch.Tensor:
    """Mark a host tensor's memory as pinned; returns the tensor."""
    for part in with_memory(tensor):
        storage: Any = part.untyped_storage()
        storage._sim_pinned = True
    return tensor


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether a host tensor is in pinned memory."""
    return tensor.device.type == "cpu" and all(
        hasattr(part.untyped_storage(), _MARK) for part in with_memory(tensor)
    )


def pinned_copy(tensor: torch.Tensor) -> torch.Tensor:
    """What `Tensor.pin_memory` returns: the tensor itself where it is pinned, else a copy that is."""
    return tensor if is_pinned(tensor) else pin(tensor.detach().clone())


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
