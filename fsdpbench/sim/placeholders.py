"""What a simulated tensor answers when Python asks for its value: zero, but what is asked of is finite.

`if not torch.isfinite(loss): raise` must not end a simulated training. The answers of `isfinite`, and of
`all` over them, are marked, and read as true.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from fsdpbench.sim.tensors import is_on_device
from fsdpbench.sim.torchscript import stand_in_for_builtin

_TRUE = "_sim_is_true"


def placeholder(tensor: torch.Tensor) -> float | int | bool | complex:
    """The value of a tensor with one element, of its dtype."""
    zero: float | int | bool | complex = torch.zeros((), dtype=tensor.dtype).item()
    return True if getattr(tensor, _TRUE, False) else zero


def install_placeholders() -> None:
    """Mark what `isfinite` answers, and `all` over marked tensors."""
    for owner in (torch, torch.Tensor):
        for name, marks in (("isfinite", _always), ("all", _if_marked)):
            original = getattr(owner, name)
            marking = _marking(original, marks)
            setattr(owner, name, marking)
            stand_in_for_builtin(original, marking)


def _always(tensor: torch.Tensor) -> bool:
    return True


def _if_marked(tensor: torch.Tensor) -> bool:
    return getattr(tensor, _TRUE, False)


def _marking(
    function: Callable[..., torch.Tensor], marks: Callable[[torch.Tensor], bool]
) -> Callable[..., torch.Tensor]:
    @functools.wraps(function)
    def call(tensor: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = function(tensor, *args, **kwargs)
        if isinstance(result, torch.Tensor) and is_on_device(result) and marks(tensor):
            result._sim_is_true = True  # type: ignore[attr-defined]
        return result

    return call
