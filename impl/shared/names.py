"""Names without what wrappers put into them: FSDP1, activation checkpointing, the compiler."""

from __future__ import annotations

from collections.abc import Sequence

WRAPPED = "_fsdp_wrapped_module"
"""The name under which an FSDP1 wrapper registers what it wraps."""
FLAT_NAME = "_flat_param"
"""The name under which the module that an FSDP1 wrapper wraps registers the flat parameter."""
CHECKPOINTED = "_checkpoint_wrapped_module"
"""The name under which a wrapper for activation checkpointing does."""
INSERTED = (WRAPPED, CHECKPOINTED)
"""What state dicts do not show. They do show the compiler's `_orig_mod`, as torch's do."""
NOT_SHOWN = (*INSERTED, "_orig_mod")
"""What people need not see in a unit's name."""


def plain_name(name: str, without: Sequence[str] = INSERTED) -> str:
    """``name`` without these parts; a trailing dot stays."""
    if "_" not in name:
        return name
    return ".".join(part for part in name.split(".") if part not in without)
