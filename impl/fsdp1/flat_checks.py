"""Misuse of flat parameters that would otherwise train nothing, or fail far from its cause."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..runtime.unit import Unit
from .flat_param import FlatPresentation
from .original_params import OriginalPresentation

_REPLACED = "_fsdp_replaced_by"
"""Attribute of a parameter that is not trained any more: what took its place."""

# -- optimizers that were made before wrapping ---------------------------------------------------------------


class _OptimizerGuard:
    """Looks at every optimizer before its first step after something was wrapped."""

    def __init__(self) -> None:
        self._wrapped = 0
        self._seen: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()

    def wrapped(self) -> None:
        """Parameters were replaced: look at all optimizers once more."""
        if not self._wrapped:
            register_optimizer_step_pre_hook(self._before_step)
        self._wrapped += 1

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._seen.get(optimizer) == self._wrapped:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                title = parameter.__dict__.get(_REPLACED)
                if title is not None:
                    raise RuntimeError(
                        f"this {type(optimizer).__name__} was made before the model was wrapped and holds a "
                        f"parameter of shape {tuple(parameter.shape)} that {title} trains no more: make it "
                        "after wrapping, from the wrapped model's parameters(), or pass use_orig_params=True"
                    )
        self._seen[optimizer] = self._wrapped


_optimizers = _OptimizerGuard()


def mark_replaced(parameters: Iterable[nn.Parameter], title: str) -> None:
    """``parameters`` are trained no more, since a unit of the module ``title`` took their values."""
    marked = list(parameters)
    for parameter in marked:
        parameter.__dict__[_REPLACED] = title
    if marked:
        _optimizers.wrapped()


# -- forwards outside of the unit ----------------------------------------------------------------------------


def check_first_calls(unit: Unit) -> None:
    """Let each module with parameters of ``unit`` check at its calls that they are gathered.

    A module stops checking when it was called rightly once, so that training pays nothing; with
    ``TORCH_DISTRIBUTED_DEBUG`` at ``INFO`` or ``DETAIL`` it goes on.
    """
    for module in {place.module for parameter in unit.parameters for place in parameter.places}:
        _CallCheck(unit, module)


class _CallCheck:
    def __init__(self, unit: Unit, module: nn.Module) -> None:
        assert isinstance(unit.presentation, (FlatPresentation, OriginalPresentation))
        self._unit = unit
        self._presentation = unit.presentation
        self._handle = module.register_forward_pre_hook(self._check)

    def _check(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        unit = self._unit
        if not unit.shows_unsharded and not self._presentation.shows_full:
            raise RuntimeError(
                f"{type(module).__name__} was called while its parameters are sharded: they belong to unit "
                f"'{unit.name}', which gathers them in its own forward. Call that, or wrap this module by "
                "itself"
            )
        if dist.get_debug_level() == dist.DebugLevel.OFF:
            self._handle.remove()
