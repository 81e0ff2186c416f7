"""Puts functions before torch's calls. Made before the script starts, in a process of its own: nothing is
undone."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed.fsdp as fsdp
from torch.utils.data import DataLoader

from fsdpbench.torch_internals import FULLY_SHARD_PLACES

Before = Callable[[Any, dict[str, Any]], None]
"""Called with the module (dataset, parameters, ...) and the keyword arguments, which it may change."""


def replace_fully_shard(make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put `make(original)` in the place of torch's `fully_shard`, wherever that is imported from."""
    original = fsdp.fully_shard
    made = make(original)
    made.state = original.state  # type: ignore[attr-defined]
    for name in FULLY_SHARD_PLACES:
        module = sys.modules.get(name)
        if module is not None and getattr(module, "fully_shard", None) is original:
            module.fully_shard = made  # type: ignore[attr-defined]


def around_fully_shard(before: Before, after: Callable[[Any], None] | None = None) -> None:
    """`before(module, arguments)`, then torch's `fully_shard`, then `after(module)`."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def fully_shard(module: Any, **kwargs: Any) -> Any:
            before(module, kwargs)
            made = original(module, **kwargs)
            if after is not None:
                after(module)
            return made

        return fully_shard

    replace_fully_shard(make)


def around_fsdp1(before: Before) -> None:
    """`before(module, arguments)` of every `FullyShardedDataParallel`, also of those that a policy makes."""
    around_init(fsdp.FullyShardedDataParallel, before)


def around_loader(before: Before) -> None:
    """`before(dataset, arguments)` of every `DataLoader`."""
    around_init(DataLoader, before)


def around_init(kind: Any, before: Before) -> None:
    """`before(first, arguments)`, then the constructor; arguments by position are there by name."""
    original = kind.__init__
    names = list(inspect.signature(original).parameters)[2:]

    @functools.wraps(original)
    def init(made: Any, *args: Any, **kwargs: Any) -> None:
        if not args:
            args = (kwargs.pop(_first(original)),)
        first, *more = args
        kwargs |= dict(zip(names, more, strict=False))
        before(first, kwargs)
        original(made, first, **kwargs)

    kind.__init__ = init


@functools.cache
def _first(function: Any) -> str:
    return list(inspect.signature(function).parameters)[1]
