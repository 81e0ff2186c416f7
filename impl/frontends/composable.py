"""torch's record of the composable APIs that were applied to a module: ours and torch's see each other there.

``replicate`` leaves alone what ``fully_shard`` manages, and the other way round::

    fully_shard(model.experts)   # sharded
    replicate(model)             # the rest, by DDP
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ..shared.torch_internals import REGISTRY_KEY, RegistryItem

_NAME, _REPLICATE = "fully_shard", "replicate"


def check_not_applied(module: nn.Module) -> None:
    """Raise AssertionError if ``fully_shard``, ours or torch's, was applied to this very module before."""
    if _NAME in module.__dict__.get(REGISTRY_KEY, ()):
        raise AssertionError(
            f"this {type(module).__name__} was already given to fully_shard, which is applied to a module "
            "once; wrap it with its final settings"
        )


def mark_applied(module: nn.Module) -> None:
    """Note that ``fully_shard`` was applied to ``module``."""
    registry: dict[str, Any] = module.__dict__.setdefault(REGISTRY_KEY, {})
    registry[_NAME] = RegistryItem()


def is_replicated(module: nn.Module) -> bool:
    """Whether DDP manages ``module``, by torch's ``replicate``."""
    return _REPLICATE in module.__dict__.get(REGISTRY_KEY, ())
