"""How a unit is told to reduce its gradients, and what it keeps of them between backward passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from .comm_hooks import CommHook
    from .custom_comm import ReduceScatter
    from .streams import Lane
    from .unit import Unit


@dataclass(frozen=True)
class PartialSum:
    """A sum over one shard group: of which parameters, where each one's part starts, and the parts, 1-D."""

    which: Sequence[int]
    offsets: Sequence[int]
    parts: torch.Tensor


@dataclass
class GradientState:
    """What a unit keeps of its gradients between backward passes, and how it is told to reduce them."""

    synchronize: bool = True
    """Reduce at all; off while accumulating without communication."""
    all_reduce: bool = True
    """Sum over replicas; off while accumulating with reduce-scatter only."""
    unused_as_zero: bool = False
    """Reduce zeros for parameters without a gradient, so that ranks may use different ones."""
    divide_factor: float | None = None
    force_sum: bool = False
    comm_hook: CommHook | None = None
    """Reduces in place of the reducer."""
    reduce_scatter: ReduceScatter | None = None
    """Reduce-scatters in place of the backend, in memory of its own."""
    all_reduce_hook: Callable[[torch.Tensor], None] | None = None
    """Called with the reduced shard before it is delivered, on ``hook_lane`` or the lane of all-reduces."""
    hook_lane: Lane | None = None
    held: int = 1
    """How many units' gradients may be kept until they are copied, before computation waits for one."""
    accumulated: dict[int, torch.Tensor] = field(default_factory=dict)
    """Unsharded gradients in the reduce dtype, kept where autograd's own accumulation would be in a lower
    one.
    """
    partial: PartialSum | None = None
    """A reduce-scattered gradient that awaits its all-reduce."""
    held_back: bool = False
    """Whether backward passes that are over left gradients here that are not reduced, or not on all ranks."""


def take_gradients(unit: Unit) -> tuple[tuple[int, ...], list[torch.Tensor]]:
    """Take the unsharded gradients out of a unit: indices of the parameters that have one, and the
    gradients.
    """
    which: list[int] = []
    gradients: list[torch.Tensor] = []
    keeps = unit.gradients.accumulated
    accumulating = bool(keeps)
    for index, parameter in enumerate(unit.unsharded):
        gradient = parameter.grad
        if gradient is not None:
            parameter.grad = None
        if accumulating:
            kept = keeps.pop(index, None)
            if kept is not None:
                gradient = kept if gradient is None else kept.add_(gradient)
            elif gradient is not None:
                gradient = gradient.to(unit.precision.reduce)
        if gradient is None and unit.gradients.unused_as_zero and parameter.requires_grad:
            dtype = unit.precision.reduce if accumulating else unit.precision.compute
            gradient = torch.zeros_like(parameter, dtype=dtype)
        if gradient is not None:
            which.append(index)
            gradients.append(gradient)
    if not unit.plain:
        gradients = unit.local_gradients(which, gradients)
    return tuple(which), gradients


def keep_gradients(unit: Unit) -> None:
    """Accumulate without reducing: in the reduce dtype where that is another than autograd's."""
    if unit.precision.reduce == unit.precision.compute:
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


def step_in_backward(parameter: nn.Parameter) -> None:
    """Let the optimizers of ``_apply_optimizer_in_backward`` step with the reduced gradient, and drop it."""
    for optimizer in parameter.__dict__["_in_backward_optimizers"]:
        optimizer.step()
    parameter.grad = None
