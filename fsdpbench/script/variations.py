"""Variations of a script that take memory, made without a change of its text: what one line of it would do.

checkpoint   every unit that is wrapped (`fully_shard`, FSDP1's wrapper) recomputes its forward in backward
reshard      units free their parameters after forward, whatever the script says
half-batch   `DataLoader` makes batches of half the size
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

import torch.distributed.fsdp as fsdp
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader


class Variation(StrEnum):
    """What is varied."""

    CHECKPOINT = "checkpoint"
    RESHARD = "reshard"
    HALF_BATCH = "half-batch"


class NoEffectError(RuntimeError):
    """A script ran, and there was nothing in it to vary."""

    def __init__(self, variation: Variation) -> None:
        super().__init__(f"the script has nothing that the variation {variation.value!r} could change")


class Varied:
    """Puts a variation instead of torch's own calls. Made before the script starts, in a process of its own.

    ``count``: how often it changed something.
    """

    def __init__(self, variation: Variation) -> None:
        self.variation = variation
        self.count = 0
        if variation is Variation.HALF_BATCH:
            self._around_init(DataLoader, self._halved)
        elif variation is Variation.RESHARD:
            self._around_fully_shard(self._resharded)
            self._around_init(fsdp.FullyShardedDataParallel, self._fully_sharded)
        else:
            self._around_fully_shard(self._checkpointed)
            self._around_init(fsdp.FullyShardedDataParallel, self._checkpointed_unit)

    def _around_fully_shard(self, before: Callable[[Any, dict[str, Any]], None]) -> None:
        original = fsdp.fully_shard

        @functools.wraps(original)
        def fully_shard(module: Any, **kwargs: Any) -> Any:
            before(module, kwargs)
            return original(module, **kwargs)

        fully_shard.state = original.state  # type: ignore[attr-defined]
        fsdp.fully_shard = fully_shard

    @staticmethod
    def _around_init(kind: Any, before: Callable[[Any, dict[str, Any]], None]) -> None:
        original = kind.__init__

        @functools.wraps(original)
        def init(made: Any, first: Any, *args: Any, **kwargs: Any) -> None:
            if args and kind is DataLoader:
                kwargs["batch_size"], args = args[0], ()
            before(first, kwargs)
            original(made, first, *args, **kwargs)

        kind.__init__ = init

    def _halved(self, dataset: Any, kwargs: dict[str, Any]) -> None:
        size = kwargs.get("batch_size")
        if isinstance(size, int) and size > 1:
            kwargs["batch_size"] = size // 2
            self.count += 1

    def _resharded(self, module: Any, kwargs: dict[str, Any]) -> None:
        if kwargs.get("reshard_after_forward") is False:
            kwargs["reshard_after_forward"] = True
            self.count += 1

    def _fully_sharded(self, module: Any, kwargs: dict[str, Any]) -> None:
        if kwargs.get("sharding_strategy") is fsdp.ShardingStrategy.SHARD_GRAD_OP:
            kwargs["sharding_strategy"] = fsdp.ShardingStrategy.FULL_SHARD
            self.count += 1

    def _checkpointed_unit(self, module: Any, kwargs: dict[str, Any]) -> None:
        if kwargs.get("auto_wrap_policy") is None:
            self._checkpointed(module, kwargs)

    def _checkpointed(self, module: Any, kwargs: dict[str, Any]) -> None:
        modules: Sequence[nn.Module] = module if isinstance(module, list | tuple) else [module]
        for each in modules:
            if not _has_units(each) and not hasattr(each, "_checkpoint_wrapped_module"):
                forward = each.forward
                each.forward = functools.partial(checkpoint, forward, use_reentrant=False)
                self.count += 1


def _has_units(module: nn.Module) -> bool:
    """Whether something in a module is wrapped already: then it is no block, but what holds the blocks."""
    units = (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)
    return any(isinstance(each, units) for each in module.modules() if each is not module)
