"""AdamW whose moments take two bytes an element.

The second moment moves by a thousandth of its distance a step (`betas[1]` = 0.999): less than half the
spacing of bf16, so that plain rounding would leave it where it is. It is rounded stochastically instead: up
or down with the probability that keeps the mean. The arithmetic is fp32.

    fp32   s eeeeeeee mmmmmmm|mmmmmmmmmmmmmmmm      add 16 random bits to the lower half,
    bf16   s eeeeeeee mmmmmmm                       then cut it off
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

_LOWER_HALF = 0xFFFF


class AdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019) with `exp_avg` and `exp_avg_sq` in bf16.

    Parameters of any floating dtype; gradients must have the parameters' device. Works shard by shard: on
    plain tensors and on the local parts of `DTensor`s; it never communicates. Raises ValueError for a
    negative rate, decay or epsilon and for betas outside [0, 1).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        for name, value in {"lr": lr, "eps": eps, "weight_decay": weight_decay}.items():
            if not value >= 0.0:
                raise ValueError(f"{name} must be at least 0, not {value}")
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"betas must be at least 0 and less than 1, not {betas}")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; `closure` reevaluates the model and returns the loss, which is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        state["step"] += 1
        weight, gradient, first, second = map(
            _local, (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
        )
        if not weight.numel():
            return
        gradient = gradient.float()
        beta1, beta2 = group["betas"]
        mean = first.float().lerp_(gradient, 1 - beta1)
        square = second.float().mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        round_stochastically(mean, first)
        round_stochastically(square, second)
        rate = group["lr"] / (1 - beta1 ** state["step"])
        divisor = square.div_(1 - beta2 ** state["step"]).sqrt_().add_(group["eps"])
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(mean.div_(divisor), alpha=-rate)


def round_stochastically(source: Tensor, target: Tensor) -> None:
    """Write `source` (fp32) to `target` (bf16, of the same shape), up or down so that the mean is kept."""
    bits = source.view(torch.int32)
    noise = torch.randint_like(bits, 0, _LOWER_HALF + 1)
    rounded = bits.add(noise).bitwise_and_(~_LOWER_HALF).view(torch.float32)
    # A NaN whose bits are all ones (CUDA's) would overflow into a small number.
    target.copy_(torch.where(source.isnan(), source, rounded))


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
