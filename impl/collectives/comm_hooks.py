"""Communication hooks: functions of the user that reduce a unit's gradient instead of the reducer.

A hook is called once a unit and backward pass, with what the reducer would have reduced::

    sharded    hook(state, gradient, output)    1-D: ranks x shard with padding; this rank's shard to fill
    replicas   hook(state, gradient)            1-D, reduced in place

What is here covers the usual ones: the plain average, and the average of gradients that are cast to 16 bits
for the way (gradient compression), with the names that they have in
``torch.distributed.algorithms._comm_hooks.default_hooks``. Those of torch work as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from . import comm

HookFunction = Callable[..., None]


class DefaultState:
    """What the plain hooks need: the ranks to average over, and how to divide.

    Args:
        process_group: the ranks whose gradients are averaged.

    Raises:
        ValueError: no process group.
    """

    def __init__(self, process_group: ProcessGroup) -> None:
        if process_group is None:
            raise ValueError(f"{type(self).__name__} needs a process group, for example dist.group.WORLD")
        self.process_group = process_group
        self.world_size = process_group.size()
        self._average = comm.averaging(self.world_size, torch.float16, native_average=False)

    @property
    def gradient_predivide_factor(self) -> float:
        """Divides before the sum, against overflow."""
        return self._average.before

    @property
    def gradient_postdivide_factor(self) -> float:
        """Divides after the sum; both factors together are the number of ranks."""
        return self._average.after


class LowPrecisionState(DefaultState):
    """The same for the compressing hooks.

    Args:
        parameter_type: the dtype that reduced gradients are cast to.
    """

    def __init__(self, process_group: ProcessGroup, parameter_type: torch.dtype = torch.float32) -> None:
        super().__init__(process_group)
        self.parameter_type = parameter_type


def allreduce_hook(state: DefaultState, grad: torch.Tensor) -> None:
    """Average ``grad`` over all ranks, in place."""
    _divide(grad, state.gradient_predivide_factor)
    comm.all_reduce(grad, state.process_group, dist.ReduceOp.SUM, async_op=False)
    _divide(grad, state.gradient_postdivide_factor)


def reduce_scatter_hook(state: DefaultState, grad: torch.Tensor, output: torch.Tensor) -> None:
    """Leave this rank's shard of the average of ``grad`` in ``output``."""
    _divide(grad, state.gradient_predivide_factor)
    comm.reduce_scatter(output, grad, state.process_group, dist.ReduceOp.SUM, async_op=False)
    _divide(output, state.gradient_postdivide_factor)


def fp16_compress_hook(
    state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None = None
) -> None:
    """As the plain hooks (by whether there is an ``output``), with ``grad`` cast to fp16 for the way."""
    _compressed(torch.float16, state, grad, output)


def bf16_compress_hook(
    state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None = None
) -> None:
    """As the plain hooks (by whether there is an ``output``), with ``grad`` cast to bf16 for the way."""
    _compressed(torch.bfloat16, state, grad, output)


def _divide(tensor: torch.Tensor, factor: float) -> None:
    if factor > 1:
        tensor.div_(factor)


def _compressed(
    dtype: torch.dtype, state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None
) -> None:
    # The casts replace a tensor's data: who called holds on to the tensor itself.
    grad.data = grad.data.to(dtype)
    if output is None:
        allreduce_hook(state, grad)
        reduced = grad
    else:
        output.data = output.data.to(dtype)
        reduce_scatter_hook(state, grad, output)
        reduced = output
    reduced.data = reduced.data.to(state.parameter_type)


# -- registering ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CommHook:
    """A hook with its state.

    Attributes:
        compresses: the hook casts by itself, so it gets gradients in the dtype in which they were computed.
    """

    function: HookFunction
    state: Any
    compresses: bool

    @classmethod
    def of(cls, function: HookFunction, state: Any) -> CommHook:
        """Raises ``ValueError`` if ``function`` cannot be called."""
        if not callable(function):
            raise ValueError(f"The communication hook must be callable but got {function!r}")
        return cls(function, state, function in _compressing_hooks())

    def reduce(self, gradient: torch.Tensor, output: torch.Tensor | None, where: str) -> None:
        """Call the hook for the unit ``where``; ``output`` is ``None`` for replicas.

        Raises:
            TypeError: the hook does not take the arguments of such a unit.
        """
        given = (gradient,) if output is None else (gradient, output)
        try:
            self.function(self.state, *given)
        except TypeError as error:
            names = "state, gradient" if output is None else "state, gradient, output"
            raise TypeError(
                f"unit '{where}' is {'not ' if output is None else ''}sharded, so its communication hook is "
                f"called with ({names}): {error}"
            ) from error


def _compressing_hooks() -> tuple[HookFunction, ...]:
    from ..shared.torch_internals import default_hooks as torch_hooks

    ours = (fp16_compress_hook, bf16_compress_hook)
    return (*ours, torch_hooks.fp16_compress_hook, torch_hooks.bf16_compress_hook)
