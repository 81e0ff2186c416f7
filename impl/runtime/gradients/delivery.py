"""The end of a reduction: what becomes of its result."""

from __future__ import annotations

import torch

from ...collectives.exchange import plain
from ..unit import Unit


def drops_output(unit: Unit) -> bool:
    """Whether the reduced gradient's memory is given up at delivery, where usually it becomes ``grad``: it is
    cast, added to an earlier gradient, or used up by a hook.
    """
    if unit.precision.delivered != unit.precision.reduce:
        return True
    for parameter in unit.presentation.trained():
        if parameter.grad is not None or parameter._post_accumulate_grad_hooks:
            return True
        if "_in_backward_optimizers" in parameter.__dict__:
            return True
    return False


def deliver_local(unit: Unit, which: tuple[int, ...], gradients: list[torch.Tensor]) -> None:
    """World size 1: the gradients themselves, cast and scaled only if that was asked for."""
    precision, factor = unit.precision, unit.gradients.divide_factor
    gradients = [g if type(g) is torch.Tensor else plain(g) for g in gradients]
    if precision.reduce != precision.compute:
        gradients = [g.to(precision.reduce) for g in gradients]
    if factor is not None and factor != 1:
        gradients = [g / factor for g in gradients]
    if precision.delivered != precision.reduce:
        gradients = [g.to(precision.delivered) for g in gradients]
    unit.presentation.deliver_local(gradients, which)
