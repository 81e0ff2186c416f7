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
        compresses: whether the hook casts gradients itself; it then gets them in the compute dtype.
    """

    function: Callable[..., None]
    state: Any
    compresses: bool

    def reduce(self, gradient: torch.Tensor, output: torch.Tensor | None, where: str) -> None:
        """Call the hook for the unit ``where``; ``output`` is ``None`` if the unit is not sharded.

        Raises:
            TypeError: the hook does not accept these arguments.
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
    """A sum over one shard group: parameter indices, offset of each parameter's part, and the 1-D parts."""

    which: Sequence[int]
    offsets: Sequence[int]
    parts: torch.Tensor


@dataclass
class GradientState:
    """A unit's settings of gradient reduction, and the gradients that it keeps between backward passes."""

    # Whether to reduce; False while accumulating without communication.
    synchronize: bool = True
    # Whether to all-reduce over replicas; False while accumulating with reduce-scatter only.
    all_reduce: bool = True
    # Reduce zeros for parameters without a gradient, so that ranks may use different parameters.
    unused_as_zero: bool = False
    divide_factor: float | None = None
    force_sum: bool = False
    # The user's hook that replaces the collectives.
    comm_hook: CommHook | None = None
    # A custom reduce-scatter, which allocates its own memory.
    reduce_scatter: ReduceScatter | None = None
    # Called with the reduced shard before delivery, on ``hook_stream`` or else on the all-reduce stream.
    all_reduce_hook: Callable[[torch.Tensor], None] | None = None
    hook_stream: Stream | None = None
    # Number of units whose gradients may wait for their copy-in before the compute stream waits.
    held: int = 1
    # Unsharded gradients accumulated in the reduce dtype, if autograd would accumulate in a lower one.
    accumulated: dict[int, torch.Tensor] = field(default_factory=dict)
    # A reduce-scattered gradient that is not all-reduced yet.
    partial: PartialSum | None = None
    # Whether earlier backward passes left gradients that are not reduced, or not over all ranks.
    held_back: bool = False

    @property
    def replaced(self) -> bool:
        """Return whether a communication hook or a custom collective reduces instead of the backend."""
        return self.comm_hook is not None or self.reduce_scatter is not None

    def drop(self, unsharded: Sequence[nn.Parameter]) -> None:
        """Drop gradients that were not reduced yet, also those of the unit's ``unsharded`` parameters."""
        self.accumulated.clear()
        self.partial = None
        self.held_back = False
        for parameter in unsharded:
            parameter.grad = None


def any_gradient(parameters: Iterable[nn.Parameter]) -> bool:
    """Return whether any of ``parameters`` has a gradient."""
    return not all(map(is_, map(GRAD, parameters), NONE))


def gradients_arrived(sharded: Sequence[nn.Parameter], which: Iterable[int]) -> bool:
    """Run the post-accumulate-grad hooks of the sharded parameters ``which``; autograd does not reach them.

    Optimizers of ``_apply_optimizer_in_backward`` step with the reduced gradient and drop it. Return whether
    there are such optimizers, even if this rank has no elements to step on.
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
            if parameter.grad is not None:  # this rank has elements, and no earlier hook dropped the gradient
                hook(parameter)
        if OPTIMIZERS in parameter.__dict__ and parameter.grad is not None:
            for optimizer in parameter.__dict__[OPTIMIZERS]:
                optimizer.step()
            parameter.grad = None
    return any(OPTIMIZERS in parameter.__dict__ for parameter in arrived)
