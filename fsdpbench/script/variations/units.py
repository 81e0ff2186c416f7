"""Other units: each block, the module around them, two blocks at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed.fsdp as fsdp
from torch import nn
from torch.distributed.fsdp.wrap import CustomPolicy

from fsdpbench.script.interposing.blocks import blocks_of, has_units, unwrapped_root
from fsdpbench.script.interposing.calls import around_init, replace_fully_shard

_FullyShard = Callable[..., Any]


class Blocks:
    """Units are the repeated blocks and the model around them, whatever else the script wraps.

    Calls for parts of the model wait until the model's own call comes.
    """

    def __init__(self) -> None:
        self.count = 0
        self._waiting: list[tuple[Any, dict[str, Any]]] = []
        self._inside = False
        replace_fully_shard(self._made)
        self._around_fsdp1()
        around_init(torch.optim.Optimizer, lambda parameters, kwargs: self._flush())

    def _made(self, original: _FullyShard) -> _FullyShard:
        self._original = original

        def fully_shard(module: Any, **kwargs: Any) -> Any:
            blocks = None if isinstance(module, list | tuple) else blocks_of(module)
            if blocks is None:
                self._waiting.append((module, kwargs))
                return module
            of_units = self._waiting[0][1] if self._waiting else kwargs
            for block in blocks.modules:
                original(block, **of_units)
            self._waiting.clear()
            self.count += 1
            return original(module, **kwargs)

        return fully_shard

    def _flush(self) -> None:
        for module, kwargs in self._waiting:
            self._original(module, **kwargs)
        self._waiting.clear()

    def _around_fsdp1(self) -> None:
        kind: Any = fsdp.FullyShardedDataParallel
        original = kind.__init__

        def init(made: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
            if not self._inside and not args and not has_units(module):
                blocks = blocks_of(module)
                if blocks is not None:
                    chosen = set(blocks.modules)
                    kwargs["auto_wrap_policy"] = CustomPolicy(lambda each: each in chosen)
                    self.count += 1
            before, self._inside = self._inside, True
            try:
                original(made, module, *args, **kwargs)
            finally:
                self._inside = before

        kind.__init__ = init


class Root:
    """The module around all units becomes one as the first optimizer is made (`fully_shard` alone)."""

    def __init__(self) -> None:
        self.count = 0
        self._kwargs: dict[str, Any] = {}
        replace_fully_shard(self._made)
        around_init(torch.optim.Optimizer, self._before_optimizer)

    def _made(self, original: _FullyShard) -> _FullyShard:
        self._original = original

        def fully_shard(module: Any, **kwargs: Any) -> Any:
            self._kwargs = {name: value for name, value in kwargs.items() if name != "reshard_after_forward"}
            return original(module, **kwargs)

        return fully_shard

    def _before_optimizer(self, parameters: Any, kwargs: dict[str, Any]) -> None:
        root = unwrapped_root()
        if self.count or root is None:
            return
        before = dict(root.named_parameters())
        self._original(root, **self._kwargs)
        after = dict(root.named_parameters())
        changed = {id(old): after[name] for name, old in before.items() if name in after}
        _exchange(parameters, changed)
        self.count += 1


def _exchange(parameters: Any, changed: dict[int, Any]) -> None:
    """Put the sharded parameters in the place of those that they were made of; generators go to the new ones
    by themselves."""
    if not isinstance(parameters, list):
        return
    for index, each in enumerate(parameters):
        if isinstance(each, dict):
            held = each["params"]
            held = [held] if isinstance(held, torch.Tensor) else held
            if isinstance(held, Iterable):
                each["params"] = [changed.get(id(one), one) for one in held]
        else:
            parameters[index] = changed.get(id(each), each)


class Pairs:
    """Two blocks of one class that are wrapped after each other become one unit (`fully_shard` alone)."""

    def __init__(self) -> None:
        self.count = 0
        self._first: tuple[Any, dict[str, Any]] | None = None
        replace_fully_shard(self._made)
        around_init(torch.optim.Optimizer, lambda parameters, kwargs: self._flush())

    def _made(self, original: _FullyShard) -> _FullyShard:
        self._original = original

        def fully_shard(module: Any, **kwargs: Any) -> Any:
            if isinstance(module, list | tuple) or has_units(module):
                self._flush()
                return original(module, **kwargs)
            if self._first is None:
                self._first = module, kwargs
                return module
            first, _ = self._first
            if type(first) is not type(module):
                self._flush()
                self._first = module, kwargs
                return module
            self._first = None
            original([first, module], **kwargs)
            self.count += 1
            return module

        return fully_shard

    def _flush(self) -> None:
        if self._first is not None:
            module, kwargs = self._first
            self._first = None
            self._original(module, **kwargs)
