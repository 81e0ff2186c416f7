"""Which shards optimizers wrote to, counted where they step.

Version counters do not show it all: neither fused optimizers nor those that step on a list of ``DTensor``s at
once (``foreach``, the default on a GPU) move them on. What was gathered before a step is stale, and backward
must not use what was gathered after it (``unit.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from functools import cache
from itertools import repeat
from operator import attrgetter, is_
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from .unit import Unit

_GRAD = attrgetter("grad")

_units: WeakSet[Unit] = WeakSet()
"""All units whose parameters optimizers may hold."""

_stepped_by: MutableMapping[Optimizer, tuple[tuple[int, int], WeakSet[Unit]]] = WeakKeyDictionary()
"""By optimizer: how many units and parameters there were when its units were looked for, and these."""


def count_steps(units: Iterable[Unit]) -> None:
    """Count from now on in ``Unit.writes`` how often an optimizer steps on these units' parameters."""
    _install_hook()
    _units.update(units)


@cache
def _install_hook() -> None:
    """Install the hook on all optimizers of this process, once."""
    register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return  # a step that is traced: version counters are what is left
    for unit in _units_of(optimizer):
        if not all(map(is_, map(_GRAD, unit.presentation.trained()), repeat(None))):
            unit.writes += 1


def _units_of(optimizer: Optimizer) -> Iterable[Unit]:
    """The units with parameters that ``optimizer`` holds; looked for again where either got more."""
    counts = len(_units), sum(len(group["params"]) for group in optimizer.param_groups)
    known = _stepped_by.get(optimizer)
    if known is None or known[0] != counts:
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        found = WeakSet(
            unit for unit in _units if not held.isdisjoint(map(id, unit.presentation.trained()))
        )
        known = _stepped_by[optimizer] = counts, found
    return known[1]
