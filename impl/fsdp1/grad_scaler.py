"""Loss scaling for fp16 where each rank holds a part of the gradients.

``torch.amp.GradScaler`` looks for overflows in the gradients that it sees. With sharded gradients each rank
sees its own part only, so one rank would skip the optimizer's step and the others would not. Here the ranks
agree first: one all-reduce of one number an optimizer and step, whatever devices the gradients are on.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup


class ShardedGradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` over all ranks of a process group.

    Args:
        device: type of the device that the scale is on, and that the group communicates from; gradients may
            be elsewhere, as with CPU offload.
        init_scale, backoff_factor, growth_factor, growth_interval, enabled: as in ``GradScaler``.
        process_group: the ranks that take or skip a step together; ``None`` is all of them.
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
        """``outputs`` (a tensor, or tensors in an iterable) times the scale, each in its own dtype.

        In mixed precision the loss is fp16; the scale, in fp32, must not widen it.
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
        """Unscale this rank's gradients (fp16 ones too), then agree on whether any rank's overflowed.

        The base class comes here from ``unscale_`` and from steps of optimizers that unscale by themselves.
        """
        values = (inv_scale, found_inf)
        if _are_offloaded(optimizer):  # the base class would copy them to the host and read them too early
            values = (inv_scale.cpu(), found_inf.cpu())
        found = super()._unscale_grads_(optimizer, *values, True)
        if not found:
            found = {found_inf.device: found_inf}  # a rank may hold no gradients, and must still take part
        agreed = torch.stack([each.to(found_inf.device) for each in found.values()]).amax()
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=self.process_group)
        for each in found.values():
            each.copy_(agreed)
        return found


def _are_offloaded(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's gradients are on the host."""
    grads = (parameter.grad for group in optimizer.param_groups for parameter in group["params"])
    return all(grad.device.type == "cpu" for grad in grads if grad is not None)
