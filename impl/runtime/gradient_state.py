"""A unit's settings of gradient reduction, and the gradients that it keeps between backward passes."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn

from ..collectives.comm import ReduceScatter
from ..shared import error_text
from ..shared.torch_internals import DisableTorchFunction
from .streams import Stream

GRAD = attrgetter("grad")
NONE = repeat(None)
# Where ``_apply_optimizer_in_backward`` keeps a parameter's optimizers.
OPTIMIZERS = "_in_backward_optimizers"
_ALWAYS = repeat(OPTIMIZERS)
_HOOKS = attrgetter("_post_accumulate_grad_hooks")


@dataclass(frozen=True)
class CommHook:
    """A user's communication hook with its state.

    Attributes:
        compresses: the hook casts by itself, so it gets gradients in the dtype in which they were computed.
    """

    function: Callable[..., None]
    state: Any
    compresses: bool

    def reduce(self, gradient: torch.Tensor, output: torch.Tensor | None, where: str) -> None:
        """Call the hook for the unit ``where``; ``output`` is ``None`` for replicas.

        Raises:
            TypeError: the hook does not take the arguments of such a unit.
        """
        given = (gradient,) if output is None else (gradient, output)
        try:
            self.function(self.state, *given)
        except TypeError as error:
            kind = "not sharded" if output is None else "sharded"
            names = "state, gradient" if output is None else "state, gradient, output"
            raise TypeError(error_text("gradient_state.reduce", where, kind, names, error)) from error


@dataclass(frozen=True)
class PartialSum:
    """A sum over one shard group: of which parameters, where each one's part starts, and the parts, 1-D."""

    which: Sequence[int]
    offsets: Sequence[int]
    parts: torch.Tensor


@dataclass
class GradientState:
    """A unit's settings of gradient reduction, and the gradients that it keeps between backward passes."""

    # Reduce at all; off while accumulating without communication.
    synchronize: bool = True
    # Sum over replicas; off while accumulating with reduce-scatter only.
    all_reduce: bool = True
    # Reduce zeros for parameters without a gradient, so that ranks may use different ones.
    unused_as_zero: bool = False
    divide_factor: float | None = None
    force_sum: bool = False
    # Reduces instead of the reducer.
    comm_hook: CommHook | None = None
    # Reduce-scatters instead of the backend, in memory of its own.
    reduce_scatter: ReduceScatter | None = None
    # Called with the reduced shard before delivery, on ``hook_stream`` or the stream of all-reduces.
    all_reduce_hook: Callable[[torch.Tensor], None] | None = None
    hook_stream: Stream | None = None
    # How many units' gradients may be kept until they are copied, before computation waits for one.
    held: int = 1
    # Unsharded gradients in the reduce dtype, kept where autograd's own accumulation would be in a lower one.
    accumulated: dict[int, torch.Tensor] = field(default_factory=dict)
    # A reduce-scattered gradient that awaits its all-reduce.
    partial: PartialSum | None = None
    # Whether backward passes that are over left gradients here that are not reduced, or not on all ranks.
    held_back: bool = False

    @property
    def replaced(self) -> bool:
        """Return whether something else than the backend reduces, or has memory of its own for it."""
        return self.comm_hook is not None or self.reduce_scatter is not None

    def drop(self, unsharded: Sequence[nn.Parameter]) -> None:
        """Forget what was not reduced yet, at the unit's ``unsharded`` parameters too."""
        self.accumulated.clear()
        self.partial = None
        self.held_back = False
        for parameter in unsharded:
            parameter.grad = None


def any_gradient(parameters: Iterable[nn.Parameter]) -> bool:
    """Return whether one of them has a gradient."""
    return not all(map(is_, map(GRAD, parameters), NONE))


def gradients_arrived(sharded: Sequence[nn.Parameter], which: Iterable[int]) -> bool:
    """Run the hooks of the sharded parameters ``which``, which their gradients do not reach through autograd.

    Optimizers of ``_apply_optimizer_in_backward`` step with the reduced gradient, and drop it. Return whether
    there are any, also if this rank has no element to step on.
    """
    with DisableTorchFunction():
        if not any(map(_HOOKS, sharded)) and not any(map(hasattr, sharded, _ALWAYS)):
            return False
        arrived = [
            sharded[index]
            for index in which
            if sharded[index]._post_accumulate_grad_hooks or OPTIMIZERS in sharded[index].__dict__
        ]
    for parameter in arrived:
        for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):
            if parameter.grad is not None:  # this rank has elements of it, and no hook before dropped it
                hook(parameter)
        if OPTIMIZERS in parameter.__dict__ and parameter.grad is not None:
            for optimizer in parameter.__dict__[OPTIMIZERS]:
                optimizer.step()
            parameter.grad = None
    return any(OPTIMIZERS in parameter.__dict__ for parameter in arrived)
