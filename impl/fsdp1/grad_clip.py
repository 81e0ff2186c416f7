"""The norm of all gradients where each rank holds a part of them, and clipping by it.

``fully_shard`` needs nothing of this: its gradients are ``DTensor``s and ``torch.nn.utils.clip_grad_norm_``
sums over the ranks by itself.
"""

from __future__ import annotations

import functools
import math
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from ..runtime.stage import stage_of


@torch.no_grad()
def clip_grad_norm(model: nn.Module, max_norm: float, norm_type: float) -> torch.Tensor:
    """Clip the gradients of a model under ``FullyShardedDataParallel``; returns their norm before.

    Parameters of units count once for each shard group: ranks that hold replicas hold equal gradients.
    Parameters that no unit holds are taken to be equal on all ranks. The norm is a collective over each shard
    group in use.
    """
    sharded: dict[ProcessGroup | None, list[torch.Tensor]] = {}
    seen: set[int] = set()
    device = next(model.parameters()).device
    for module in model.modules():
        stage = stage_of(module)
        for unit in stage.units if stage is not None else ():
            device = unit.device  # the gradients themselves are elsewhere if they are offloaded
            grads = sharded.setdefault(unit.groups.shard, [])
            for parameter in unit.presentation.trained():
                seen.add(id(parameter))
                if parameter.grad is not None:
                    grads.append(parameter.grad)
    rest = [p.grad for p in model.parameters() if id(p) not in seen and p.grad is not None]
    if rest:
        sharded.setdefault(None, []).extend(rest)
    everything = [gradient for gradients in sharded.values() for gradient in gradients]
    # The same on every rank, whichever gradients it has.
    wide = any(parameter.dtype is torch.float64 for parameter in model.parameters())
    dtype = torch.float64 if wide else torch.float32
    norms = [_norm_over(group, gradients, norm_type, device, dtype) for group, gradients in sharded.items()]
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for gradient in everything:
        gradient.mul_(scale.to(gradient.device, gradient.dtype))
    if not everything and any(group is not None for group in sharded):
        warnings.warn(
            f"Called FSDP.clip_grad_norm_() on rank {dist.get_rank()} with no gradients -- returning the "
            f"total norm in the default dtype {torch.float32}",
            stacklevel=4,
        )
    if not everything:
        return total.float()
    return total.to(functools.reduce(torch.promote_types, [gradient.dtype for gradient in everything]))


def _norm_over(
    group: ProcessGroup | None,
    gradients: list[torch.Tensor],
    norm_type: float,
    device: torch.device,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The norm of ``gradients`` and of those of the other ranks of ``group``."""
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
