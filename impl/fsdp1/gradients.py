"""Loss scaling, clipping and communication hooks for sharded gradients.

``torch.amp.GradScaler`` checks only local gradients for overflow. With sharded gradients, one rank might skip
the optimizer step while others do not. ``ShardedGradScaler`` makes ranks agree first, by one all-reduce of
one number for each optimizer and step, whatever devices the gradients are on.
"""

import functools
import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from ..collectives import comm
from ..runtime.gradient_state import CommHook
from ..runtime.hooks import stages_in
from ..shared import error_text


class ShardedGradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` over all ranks of a process group.

    Args:
        device: type of the device of the scale and of the group's communication. Gradients may be on
            another device, as with CPU offload.
        init_scale, backoff_factor, growth_factor, growth_interval, enabled: as in ``GradScaler``.
        process_group: the ranks that run or skip a step together; ``None`` means all ranks.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(
            device,
            init_scale=init_scale,
            backoff_factor=backoff_factor,
            growth_factor=growth_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )
        self.process_group = process_group

    def scale(self, outputs: Any) -> Any:
        """Return ``outputs`` (a tensor, or an iterable of tensors) times the scale, each in its own dtype.

        In mixed precision the loss is fp16 and must stay so although the scale is fp32.
        """
        if not self._enabled:
            return outputs
        if isinstance(outputs, torch.Tensor):
            return super().scale(outputs).to(outputs.dtype)
        if isinstance(outputs, (list, tuple)):
            return type(outputs)(map(self.scale, outputs))
        if isinstance(outputs, Iterable):
            return map(self.scale, outputs)
        raise ValueError(f"scale() takes a tensor or an iterable of tensors, not {type(outputs).__name__}")

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool = True,
    ) -> dict[torch.device, torch.Tensor]:
        """Unscale this rank's gradients (fp16 ones too), then agree whether any rank has an overflow.

        The base class calls this in ``unscale_`` and in steps of optimizers that unscale by themselves.
        """
        values = (inv_scale, found_inf)
        if _are_offloaded(optimizer):  # the base class would copy them to the host and read them too early
            values = (inv_scale.cpu(), found_inf.cpu())
        found = super()._unscale_grads_(optimizer, *values, True)
        if not found:
            found = {found_inf.device: found_inf}  # a rank without gradients must still take part
        agreed = torch.stack([each.to(found_inf.device) for each in found.values()]).amax()
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=self.process_group)
        for each in found.values():
            each.copy_(agreed)
        return found


def _are_offloaded(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer's gradients are on the host."""
    grads = (parameter.grad for group in optimizer.param_groups for parameter in group["params"])
    return all(grad.device.type == "cpu" for grad in grads if grad is not None)


# The norm of all gradients over all ranks, and clipping by it.
#
# ``fully_shard`` does not need this: its gradients are ``DTensor``s, and ``torch.nn.utils.clip_grad_norm_``
# sums over ranks by itself.


@torch.no_grad()
def clip_grad_norm(model: nn.Module, max_norm: float, norm_type: float) -> torch.Tensor:
    """Clip the gradients of a model under ``FullyShardedDataParallel`` and return their norm before clipping.

    Replicas have equal gradients, so the parameters of a unit count once for its shard group. Parameters
    that no unit owns are assumed to be equal on all ranks. Collective over each shard group in use.
    """
    sharded: dict[ProcessGroup | None, list[torch.Tensor]] = {}
    seen: set[int] = set()
    device = next(model.parameters()).device
    for stage, _ in stages_in(model):
        for unit in stage.units:
            device = unit.device  # offloaded gradients are on another device
            grads = sharded.setdefault(unit.groups.shard, [])
            for parameter in unit.presentation.trained():
                seen.add(id(parameter))
                if parameter.grad is not None:
                    grads.append(parameter.grad)
    rest = [p.grad for p in model.parameters() if id(p) not in seen and p.grad is not None]
    if rest:
        sharded.setdefault(None, []).extend(rest)
    everything = [gradient for gradients in sharded.values() for gradient in gradients]
    # Equal on every rank, whatever gradients the rank has.
    wide = any(parameter.dtype is torch.float64 for parameter in model.parameters())
    dtype = torch.float64 if wide else torch.float32
    # One collective for each shard group, in the order of the modules, also on a rank without gradients.
    norms = [_norm_over(group, gradients, norm_type, device, dtype) for group, gradients in sharded.items()]
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for gradient in everything:
        gradient.mul_(scale.to(gradient.device, gradient.dtype))
    if everything:
        return total.to(functools.reduce(torch.promote_types, [gradient.dtype for gradient in everything]))
    if any(group is not None for group in sharded):
        warnings.warn(error_text("gradients.clip", dist.get_rank(), torch.float32), stacklevel=4)
    return total.float()


def _norm_over(
    group: ProcessGroup | None,
    gradients: list[torch.Tensor],
    norm_type: float,
    device: torch.device,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the norm of the gradients of all ranks of ``group``; ``gradients`` are this rank's."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for gradient in gradients:
        norm = torch.linalg.vector_norm(gradient, norm_type, dtype=dtype)
        by_device.setdefault(gradient.device, []).append(norm)
    local = torch.zeros((), device=device, dtype=dtype)
    if by_device:
        norms = [torch.linalg.vector_norm(torch.stack(n), norm_type).to(device) for n in by_device.values()]
        local = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if group is None:
        return local
    if math.isinf(norm_type):
        dist.all_reduce(local, op=dist.ReduceOp.MAX, group=group)
        return local
    powered = local**norm_type
    dist.all_reduce(powered, group=group)
    return powered ** (1 / norm_type)


# Communication hooks: functions of the user that reduce a unit's gradient instead of the reducer.
#
# A hook is called once for each unit and backward pass, with the input of the reduction::
#
#     sharded    hook(state, gradient, output)    1-D: ranks x shard with padding; this rank's shard to fill
#     replicas   hook(state, gradient)            1-D, reduced in place
#
# The hooks here are the plain average, and the average with gradients cast to 16 bits for communication
# (gradient compression). They have the same names as in
# ``torch.distributed.algorithms._comm_hooks.default_hooks``; torch's hooks work as well.


HookFunction = Callable[..., None]


class DefaultState:
    """The state of the plain hooks: the ranks to average over, and the divisors.

    Args:
        process_group: the ranks whose gradients are averaged.

    Raises:
        ValueError: ``process_group`` is None.
    """

    def __init__(self, process_group: ProcessGroup) -> None:
        if process_group is None:
            raise ValueError(f"{type(self).__name__} needs a process group, for example dist.group.WORLD")
        self.process_group = process_group
        self.world_size = process_group.size()
        self._average = comm.averaging(self.world_size, torch.float16, native_average=False)

    @property
    def gradient_predivide_factor(self) -> float:
        """Return the divisor before the sum, which avoids overflow."""
        return self._average.before

    @property
    def gradient_postdivide_factor(self) -> float:
        """Return the divisor after the sum. The product of both factors is the number of ranks."""
        return self._average.after


class LowPrecisionState(DefaultState):
    """The state of the compressing hooks.

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
    """Average ``grad`` over all ranks and write this rank's shard to ``output``."""
    _divide(grad, state.gradient_predivide_factor)
    comm.reduce_scatter(output, grad, state.process_group, dist.ReduceOp.SUM, async_op=False)
    _divide(output, state.gradient_postdivide_factor)


def fp16_compress_hook(
    state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None = None
) -> None:
    """Reduce in fp16: by ``reduce_scatter_hook`` with an ``output``, else by ``allreduce_hook``."""
    _compressed(torch.float16, state, grad, output)


def bf16_compress_hook(
    state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None = None
) -> None:
    """Reduce in bf16: by ``reduce_scatter_hook`` with an ``output``, else by ``allreduce_hook``."""
    _compressed(torch.bfloat16, state, grad, output)


def _divide(tensor: torch.Tensor, factor: float) -> None:
    if factor > 1:
        tensor.div_(factor)


def _compressed(
    dtype: torch.dtype, state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None
) -> None:
    # The casts replace ``.data``, because the caller keeps the tensor object.
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


def comm_hook(function: HookFunction, state: Any) -> CommHook:
    """Return the hook of a unit. Raises ``ValueError`` if ``function`` cannot be called."""
    if not callable(function):
        raise ValueError(f"The communication hook must be callable but got {function!r}")
    return CommHook(function, state, function in _compressing_hooks())


def _compressing_hooks() -> tuple[HookFunction, ...]:
    from ..shared.torch_internals import default_hooks as torch_hooks

    ours = (fp16_compress_hook, bf16_compress_hook)
    return (*ours, torch_hooks.fp16_compress_hook, torch_hooks.bf16_compress_hook)
