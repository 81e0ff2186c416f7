"""Muon for sharded parameters.

Muon (Jordan 2024, https://kellerjordan.github.io/posts/muon/) orthogonalises each matrix's momentum, for
which the whole matrix must be in one place. `torch.optim.Muon` on the `DTensor`s of `fully_shard` is right,
but each product of its iteration gathers again. Here a matrix is redistributed once a step and worked on by
one rank (`matrices.py`); what is computed is torch's own iteration in bf16, so that the result is the
unsharded one's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .matrices import is_sharded, worked_on_whole


class Muon(torch.optim.Muon):
    """`torch.optim.Muon` whose `step` moves each sharded matrix to one rank and back, in bf16.

    Arguments, checks and state (`momentum_buffer`, sharded as the parameter) are torch's. Parameters
    without shards are updated in place without communication. A `step` is collective: all ranks must have
    gradients of the same parameters. Raises ValueError for parameters that are not two-dimensional, as
    torch's does.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; `closure` reevaluates the model and returns the loss, which is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._step_group(group)
        return loss

    def _step_group(self, group: dict[str, Any]) -> None:
        from ..shared.torch_internals import muon_adjust_lr, muon_orthogonalise

        def orthogonalised(matrix: Tensor) -> Tensor:
            result: Tensor = muon_orthogonalise(
                matrix, group["ns_coefficients"], group["ns_steps"], group["eps"]
            )
            return result

        def apply(parameter: Tensor, update: Tensor) -> None:
            rate = muon_adjust_lr(lr, group["adjust_lr_fn"], parameter.shape)
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local.mul_(1 - lr * group["weight_decay"])
            local.add_(update, alpha=-rate)

        lr = float(group["lr"])
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        sharded: list[DTensor] = []
        updates: list[Tensor] = []
        for parameter in parameters:
            update = self._momentum(parameter, group["momentum"], nesterov=group["nesterov"])
            if is_sharded(parameter):
                sharded.append(parameter)
                updates.append(update)
            else:
                apply(parameter, orthogonalised(update))
        for parameter, result in zip(sharded, worked_on_whole(updates, sharded, orthogonalised), strict=True):
            apply(parameter, result)

    def _momentum(self, parameter: Tensor, momentum: float, *, nesterov: bool) -> Tensor:
        """This rank's part of what is to be orthogonalised, in bf16 and memory of its own."""
        gradient = parameter.grad
        assert gradient is not None
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient, memory_format=torch.preserve_format)
        buffer = state["momentum_buffer"]
        own, kept = (t.to_local() if isinstance(t, DTensor) else t for t in (gradient, buffer))
        kept.lerp_(own, 1 - momentum)
        update = own.lerp(kept, momentum) if nesterov else kept
        # torch's iteration divides in place where it need not cast.
        return update.to(torch.bfloat16, copy=not nesterov).contiguous()
