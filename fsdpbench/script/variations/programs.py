"""Variations of the optimizer, of prefetching in forward, and compiled units."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed.fsdp as fsdp
from torch import nn

from fsdpbench.script.interposing.blocks import has_units
from fsdpbench.script.interposing.calls import around_fsdp1, around_fully_shard, around_init


class Fused:
    """Optimizers that have a fused kernel use it."""

    def __init__(self) -> None:
        self.count = 0
        for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad):
            if "fused" in inspect.signature(kind.__init__).parameters:
                around_init(kind, self._before)

    def _before(self, parameters: Any, kwargs: dict[str, Any]) -> None:
        if not kwargs.get("fused"):
            kwargs |= {"fused": True, "foreach": None}
            self.count += 1


class NoneGrads:
    """Gradients are dropped where the script fills them with zeros."""

    def __init__(self) -> None:
        self.count = 0
        for kind in (torch.optim.Optimizer, nn.Module):
            self._around(kind)

    def _around(self, kind: Any) -> None:
        original = kind.zero_grad

        @functools.wraps(original)
        def zero_grad(owner: Any, set_to_none: bool = True) -> None:
            self.count += not set_to_none
            original(owner, set_to_none=True)

        kind.zero_grad = zero_grad


class _OfUnits:
    """What is done to every unit that holds no other."""

    def __init__(self) -> None:
        self.count = 0
        around_fully_shard(self._before, self._after)
        around_fsdp1(self._before_fsdp1)

    def _before_fsdp1(self, module: Any, kwargs: dict[str, Any]) -> None:
        if kwargs.get("auto_wrap_policy") is None:
            self._before(module, kwargs)

    def _before(self, module: Any, kwargs: dict[str, Any]) -> None:
        modules: Sequence[nn.Module] = module if isinstance(module, list | tuple) else [module]
        for each in modules:
            if not has_units(each):
                self.unit(each)

    def _after(self, module: Any) -> None: ...

    def unit(self, module: nn.Module) -> None:
        """Is notified of every unit before it is wrapped."""


class Compiled(_OfUnits):
    """Every unit that holds no other is compiled."""

    def unit(self, module: nn.Module) -> None:
        module.compile()
        self.count += 1


class ForwardPrefetch(_OfUnits):
    """Each unit prefetches the next one in forward (`fully_shard`)."""

    def __init__(self) -> None:
        super().__init__()
        self._units: list[nn.Module] = []
        around_init(torch.optim.Optimizer, lambda parameters, kwargs: self._connect())

    def unit(self, module: nn.Module) -> None:
        self._units.append(module)

    def _connect(self) -> None:
        units = [each for each in self._units if isinstance(each, fsdp.FSDPModule)]
        self._units = []
        for first, second in itertools.pairwise(units):
            first.set_modules_to_forward_prefetch([second])
            self.count += 1


class NoForwardPrefetch:
    """Prefetching that the script asks of `fully_shard`'s units is not done."""

    def __init__(self) -> None:
        self.count = 0
        kind: Any = fsdp.FSDPModule
        original = kind.set_modules_to_forward_prefetch

        @functools.wraps(original)
        def ignored(module: Any, modules: Any) -> None:
            self.count += 1

        kind.set_modules_to_forward_prefetch = ignored
