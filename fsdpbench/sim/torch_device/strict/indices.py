"""Indices out of range. A GPU finds them while its kernel runs, and tells at a later call.

Simulated tensors have no values, but two kinds of indices are known: those of the host beside a tensor of the
device, and single numbers that came from the host (`known_values.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch

from fsdpbench.sim.torch_device.strict.shapes import refuse_mask
from fsdpbench.sim.torch_device.strict.words import Arguments

_MASKS = (torch.bool, torch.uint8)
Bounds = tuple[torch.Tensor, int, int, int]
"""An index, its lowest and its highest value, and the dimension."""


def refuse_out_of_range(value: int, low: int, high: int, dim: int) -> None:
    """Raise what a failed assertion in a kernel raises, if ``value`` is not in [low, high]."""
    if not low <= value <= high:
        _fail_assertion(value, dim, high + 1)


def _fail_assertion(value: int, dim: int, size: int) -> NoReturn:
    raise getattr(torch, "AcceleratorError", RuntimeError)(
        "CUDA error: device-side assert triggered\n"
        f"Index {value} is out of bounds for dimension {dim} with size {size}. (A GPU says so on stderr, "
        "names the kernel, and raises this at a later call.)"
    )


def on_host_resolved(tensor: torch.Tensor, indices: Sequence[Any]) -> list[Any]:
    """Indices of `tensor[...]` with the host's masks as positions, as CUDA takes them.

    Raises: IndexError, a mask does not fit; `torch.AcceleratorError`, a position is out of range.
    """
    found: list[Any] = []
    for index in indices:
        if not isinstance(index, torch.Tensor) or not index.is_cpu:
            found.append(index)
        elif index.dtype in _MASKS:
            refuse_mask(tensor, index, len(found))
            found += index.nonzero().unbind(1)
        else:
            size = tensor.shape[len(found)] if len(found) < tensor.dim() else 0
            if index.numel() and size:
                for value in (int(index.min()), int(index.max())):
                    refuse_out_of_range(value, -size, size - 1, len(found))
            found.append(index)
    return found


def known_bounds(packet: str, arguments: Arguments) -> Iterator[Bounds]:
    """The indices of a call, with the values that they may have."""
    find = _BOUNDS.get(packet)
    if find is not None:
        yield from find(arguments)


def _rows(weight: str, indices: str) -> Callable[[Arguments], Iterator[Bounds]]:
    def find(arguments: Arguments) -> Iterator[Bounds]:
        yield arguments[indices], 0, arguments[weight].shape[0] - 1, 0

    return find


def _along_dim(arguments: Arguments) -> Iterator[Bounds]:
    tensor, dim = arguments["self"], arguments["dim"]
    if tensor.dim():
        yield arguments["index"], 0, tensor.shape[dim] - 1, dim


def _each_dim(arguments: Arguments) -> Iterator[Bounds]:
    tensor = arguments["self"]
    for dim, index in enumerate(arguments["indices"]):
        if isinstance(index, torch.Tensor) and index.dtype not in _MASKS:
            yield index, -tensor.shape[dim], tensor.shape[dim] - 1, dim


def _classes(arguments: Arguments) -> Iterator[Bounds]:
    tensor, ignored = arguments["self"], arguments["ignore_index"]
    dim = 1 if tensor.dim() > 1 else 0
    yield arguments["target"], min(0, ignored) if ignored < 0 else 0, tensor.shape[dim] - 1, dim


_BOUNDS: dict[str, Callable[[Arguments], Iterator[Bounds]]] = {
    "embedding": _rows("weight", "indices"),
    **dict.fromkeys(
        ("index_select", "gather", "scatter", "scatter_add", "index_add", "index_copy"), _along_dim
    ),
    **dict.fromkeys(("index", "index_put", "_index_put_impl"), _each_dim),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), _classes),
}
INDEXING = frozenset(_BOUNDS)
"""Operators that take indices."""
