"""Which shards optimizers wrote to, counted where they step.

Version counters do not show it all: neither fused optimizers nor those that step on many ``DTensor``s at a
time (``foreach``, the default on a GPU) move them on. What was gathered before a step is stale, and backward
must not use what was gathered after it (``unit.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from .gradient_state import any_gradient
from .unit import Unit

_units: WeakSet[Unit] = WeakSet()
_stepped_by: MutableMapping[Optimizer, tuple[int, WeakSet[Unit]]] = WeakKeyDictionary()
"""By optimizer: how many parameters it has, and their units; empty again when there are more units."""


def count_steps(units: Iterable[Unit]) -> None:
    """Count from now on how often optimizers step on these units' parameters, in ``Presentation.writes``."""
    _hook_optimizers()
    _units.update(units)
    _stepped_by.clear()


@cache
def _hook_optimizers() -> None:
    register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return  # a step that is traced: version counters are what is left
    for unit in _units_of(optimizer):
        if any_gradient(unit.presentation.trained()):
            unit.presentation.writes += 1


def _units_of(optimizer: Optimizer) -> Iterable[Unit]:
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    known = _stepped_by.get(optimizer)
    if known is None or known[0] != count:
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        found = WeakSet(unit for unit in _units if not held.isdisjoint(map(id, unit.presentation.trained())))
        known = _stepped_by[optimizer] = count, found
    return known[1]
