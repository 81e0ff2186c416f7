"""Optimizer steps on parameters that are offloaded to the host: what they take there.

The host really runs them, on its own tensors, in its own time. What they would take beside a GPU follows from
the memory that they go through, at the bandwidth that a rank has of it (`host_link.memory_gb_s`):

    parameter and states are read and written, the gradient is read         a fused step
    three times that, since each operator goes through memory again          foreach and loops
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from fsdpbench.sim.torch_device.accelerator import ACCELERATOR

_PASSES_UNFUSED = 3
"""Of AdamW: its dozen operators touch 21 tensors where the fused one touches 7."""


def register_host_optimizer() -> None:
    """Charge every optimizer's step from now on, in this process."""
    register_optimizer_step_post_hook(_charge)


def _charge(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not ACCELERATOR.started:
        return
    if ACCELERATOR.sanitizer is not None:
        ACCELERATOR.sanitizer.step_ended(optimizer)
    nbytes = 0
    for group in optimizer.param_groups:
        passes = 1 if group.get("fused") else _PASSES_UNFUSED
        for parameter in group["params"]:
            if parameter.grad is not None and _local(parameter).device.type == "cpu":
                nbytes += passes * _bytes_of_step(parameter, optimizer.state[parameter])
    ACCELERATOR.timeline.cpu += round(nbytes * ACCELERATOR.host_ns_per_byte)


def _bytes_of_step(parameter: torch.Tensor, state: dict[str, Any]) -> int:
    """Read and written for one parameter, in one pass."""
    local, gradient = _local(parameter), _local(parameter.grad)
    states = [_local(value) for value in state.values() if isinstance(value, torch.Tensor)]
    kept = sum(tensor.nbytes for tensor in states if tensor.shape == local.shape)
    return 2 * (local.nbytes + kept) + gradient.nbytes


def _local(tensor: Any) -> torch.Tensor:
    """A DTensor's own part; other tensors as they are."""
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return part
