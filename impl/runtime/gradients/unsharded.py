"""What backward left at a unit's unsharded parameters: taken to be reduced, or kept for a later pass."""

from __future__ import annotations

import torch

from ..unit import Unit


def take_gradients(unit: Unit) -> tuple[tuple[int, ...], list[torch.Tensor]]:
    """Take the unsharded gradients out of a unit: indices of the parameters that have one, and the
    gradients.
    """
    keeps, unused_as_zero = unit.gradients.accumulated, unit.gradients.unused_as_zero
    accumulating = bool(keeps)
    which: list[int] = []
    gradients: list[torch.Tensor] = []
    for index, parameter in enumerate(unit.unsharded):
        gradient = parameter.grad
        if gradient is not None:
            parameter.grad = None
            if not accumulating:
                which.append(index)
                gradients.append(gradient)
                continue
        if accumulating:
            kept = keeps.pop(index, None)
            if kept is not None:
                gradient = kept if gradient is None else kept.add_(gradient)
            elif gradient is not None:
                gradient = gradient.to(unit.precision.reduce)
        if gradient is None and unused_as_zero and parameter.requires_grad:
            dtype = unit.precision.reduce if accumulating else unit.precision.compute
            gradient = torch.zeros_like(parameter, dtype=dtype)
        if gradient is not None:
            which.append(index)
            gradients.append(gradient)
    if not unit.plain:
        gradients = unit.local_gradients(which, gradients)
    return tuple(which), gradients


def keep_gradients(unit: Unit) -> None:
    """Accumulate without reducing: in the reduce dtype where that is another than autograd's.

    What is shown meanwhile stays as autograd left it.
    """
    if unit.precision.reduce == unit.precision.compute or unit.presentation.unreduced is not None:
        return
    accumulated = unit.gradients.accumulated
    for index, parameter in enumerate(unit.unsharded):
        if parameter.grad is None:
            continue
        if index in accumulated:
            accumulated[index].add_(parameter.grad)
        else:
            accumulated[index] = parameter.grad.to(unit.precision.reduce)
        parameter.grad = None
