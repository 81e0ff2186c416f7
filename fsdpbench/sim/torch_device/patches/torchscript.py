"""TorchScript knows torch's functions by their identity: one that is replaced must be told to it."""

from __future__ import annotations

from typing import Any

from fsdpbench.torch_internals import find_builtin, register_builtin


def stand_in_for_builtin(original: Any, replacement: Any) -> None:
    """In scripted code `replacement` means what `original` meant."""
    name = find_builtin(original)
    if name is not None:
        register_builtin(replacement, name)
