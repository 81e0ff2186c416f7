"""Layers that several families share.

`reset_parameters` draws the initial weights, also of a model that was built on `meta` before.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fsdpbench.workloads.tensor_plan import ROUTERS

# GPT-2's standard deviation of initial weights (Radford et al. 2019, and its published code).
WEIGHT_STD = 0.02
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Projection(nn.Linear):
    """A linear layer with weights from N(0, std) and zero bias."""

    def __init__(self, in_features: int, out_features: int, bias: bool, std: float = WEIGHT_STD) -> None:
        self.std = std  # before `super().__init__`, which calls `reset_parameters`
        super().__init__(in_features, out_features, bias)

    def reset_parameters(self) -> None:
        _draw(self.weight, self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Lookup(nn.Embedding):
    """An embedding with weights from N(0, std)."""

    def __init__(self, entries: int, features: int, std: float = WEIGHT_STD) -> None:
        self.std = std
        super().__init__(entries, features)

    def reset_parameters(self) -> None:
        _draw(self.weight, self.std)


def _draw(weight: Tensor, std: float) -> None:
    """Draw weights from N(0, std).

    Do nothing on `meta`, which has no values: its rules in torch run in Python and took a twentieth of a
    simulated run.
    """
    if not weight.is_meta:
        nn.init.normal_(weight, std=std)


def replace_projections(
    model: nn.Module,
    block_classes: tuple[type[nn.Module], ...],
    make: Callable[[str, Projection], Projection],
) -> None:
    """Replace each linear layer of the blocks, except routers, by `make(name, layer)`, in place."""
    for block in [module for module in model.modules() if isinstance(module, block_classes)]:
        for parent in list(block.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, Projection) and name not in ROUTERS:
                    setattr(parent, name, make(name, child))


class DecoderNorm(nn.Module):
    """x / rms(x) x weight over the last dimension; keeps the shape [..., width] (Zhang and Sennrich 2019).

    Args:
        offset: weights are stored as an offset from 1 (Gemma).
        composed: separate operators in fp32, each with its result in memory, instead of torch's one kernel.
    """

    def __init__(self, width: int, eps: float, *, offset: bool, composed: bool) -> None:
        super().__init__()
        self.eps, self.offset, self.composed = eps, offset, composed
        self.weight = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weights so that their factor is 1."""
        nn.init.constant_(self.weight, 0.0 if self.offset else 1.0)

    def forward(self, x: Tensor) -> Tensor:
        if not self.composed:
            weight = 1.0 + self.weight if self.offset else self.weight
            return F.rms_norm(x, weight.shape, weight, self.eps)
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.offset:
            return (normed * (1.0 + self.weight.float())).type_as(x)
        return self.weight * normed.type_as(x)


def composed_rms_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Compute `F.rms_norm` of x, [..., width], operator by operator, as torch before 2.9 did on GPUs.

    torch had no RMSNorm before 2.4. From 2.4 to 2.8, `torch.rms_norm` was composed of operators (torch 2.8,
    `aten/src/ATen/native/layer_norm.cpp`), with the mean square in fp32 and type promotion for the rest. This
    function is here, not in the simulator, because the compiler, which fuses its operators, traces it.
    """
    mean_square = x.float().pow(2).mean(-1, keepdim=True)
    normed = x * torch.rsqrt(mean_square + (eps or torch.finfo(x.dtype).eps))
    return normed.to(x.dtype) if weight is None else weight * normed.to(weight.dtype)


def held(parameter: Tensor) -> Tensor:
    """Return the local part of `parameter`, for computation.

    Gradients of a replicated parameter are summed over the ranks, because each rank has processed other
    tokens or other features.
    """
    from torch.distributed.tensor import DTensor, Partial

    if not isinstance(parameter, DTensor):
        return parameter
    gradients = [Partial() if place.is_replicate() else place for place in parameter.placements]
    return parameter.to_local(grad_placements=gradients)
