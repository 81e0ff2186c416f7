"""Optimizers that hold tensors which a wrapper does not train: made before wrapping, inside of
``summon_full_params``, or of modules' attributes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

_REPLACED = "_fsdp_replaced_by"
"""Attribute of a parameter that is not trained any more: what took its place."""


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
                        f"this {type(optimizer).__name__} holds a tensor of shape {tuple(parameter.shape)} "
                        f"that {title} does not train: it was made before the model was wrapped, inside of "
                        "summon_full_params, or of a module's attribute; give it the wrapped model's "
                        "parameters(), or pass use_orig_params=True"
                    )
        self._seen[optimizer] = self._wrapped


_optimizers = _OptimizerGuard()


def mark_replaced(parameters: Iterable[torch.Tensor], title: str) -> None:
    """``parameters`` are trained no more, since a unit of the module ``title`` took their values."""
    marked = list(parameters)
    for parameter in marked:
        parameter.__dict__[_REPLACED] = title
    if marked:
        _optimizers.wrapped()
