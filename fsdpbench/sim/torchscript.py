"""TorchScript knows torch's functions by their identity: one that is replaced must be told to it."""

from __future__ import annotations

from typing import Any

from torch.jit import _builtins


def stand_in_for_builtin(original: Any, replacement: Any) -> None:
    """In scripted code `replacement` means what `original` meant."""
    name = _builtins._find_builtin(original)
    if name is not None:
        _builtins._register_builtin(replacement, name)
