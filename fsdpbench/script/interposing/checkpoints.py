"""Puts a function in the place of `torch.utils.checkpoint.checkpoint`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint as torch_checkpoint

from fsdpbench.torch_internals import patch

_original = torch_checkpoint.checkpoint
_torchs_own: list[Any] = [_original]
"""torch's, and what only looks on while it runs."""


def replace_checkpoint(made: Callable[..., Any]) -> None:
    """Scripts that take `checkpoint` from its module get `made`.

    Dynamo knows `checkpoint` by what its module holds. Wrappers took torch's own before, and a compiled block
    inside of one would not be compiled: so torch's own stays what Dynamo looks for, and what wraps it is
    torch's own where a compiled function calls it.
    """
    torch_checkpoint.checkpoint = made
    if getattr(made, "__wrapped__", None) is _original:
        _torchs_own.append(made)
    patch("is_utils_checkpoint", lambda original: _is_torchs_own)


def _is_torchs_own(found: Any) -> bool:
    return any(found is each for each in _torchs_own)
