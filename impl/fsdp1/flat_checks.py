"""Misuse of a unit's sharded parameters: modules called outside of their unit's forward, changes before
backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..runtime.unit import Unit
from .flat_param import FlatPresentation
from .original_params import OriginalPresentation


def check_first_calls(unit: Unit) -> None:
    """Let each module with parameters of ``unit`` check at its calls that they are gathered.

    A module stops checking when it was called rightly once, so that training pays nothing; with
    ``TORCH_DISTRIBUTED_DEBUG`` at ``INFO`` or ``DETAIL`` it continues.
    """
    for module in {place.module for parameter in unit.parameters for place in parameter.places}:
        _CallCheck(unit, module)


def check_unchanged(unit: Unit, error: type[Exception]) -> None:
    """Raise where the user changed a unit's parameters since its forward: gradients would be of both values.

    Args:
        error: raised for new data and for other parameters; a write in place is always a RuntimeError.
    """
    presentation = unit.presentation
    assert isinstance(presentation, (FlatPresentation, OriginalPresentation))
    written = presentation.changed()
    if written or (not unit.shows_unsharded and presentation.replaced()):
        how = "written to in place" if written else "replaced, or given new data"
        raise (RuntimeError if written else error)(
            "FSDP does not support changing the parameters between forward and backward, but those of unit "
            f"'{unit.name}' were {how} since its forward: change them after backward, or run forward again"
        )


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
