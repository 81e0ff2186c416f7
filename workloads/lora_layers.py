"""Linear layers with low-rank adapters (`lora.py`), and frozen ones in 4 bits.

Frozen weights may be in 4 bits, as in QLoRA (Dettmers et al. 2023, arXiv 2305.14314):

    weight         uint8, [out, in / 2]       two weights per byte: indices into the 16 levels of NF4
    weight_scale   [out, in / 64]             the largest magnitude among each 64 weights of a row

    y = x W^T,   W = LEVELS[index] * scale    computed for the product, again for the input's gradient

Both are separate frozen parameters, sharded by rows like others: half a byte per weight plus one scale per 64
weights (0.53 bytes with scales in bf16). The scales are not quantised.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fsdpbench.workloads.layers import DTYPES, Projection, held, replace_projections
from fsdpbench.workloads.lora import Lora, block_of

_ALPHA_OF_RANK = 2.0

# NF4 levels, quantiles of a normal distribution: appendix E of the QLoRA paper.
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip

_RMS = (sum(level * level for level in LEVELS) / len(LEVELS)) ** 0.5
_LIBRARY = torch.library.Library("fsdpbench_workloads", "FRAGMENT")
_LIBRARY.define("dequantise_4bit(Tensor packed, Tensor scale) -> Tensor")


def _dequantise(packed: Tensor, scale: Tensor) -> Tensor:
    levels = torch.tensor(LEVELS, dtype=scale.dtype, device=scale.device)
    numbers = torch.stack((packed >> 4, packed & 15), dim=-1)
    weights = levels[numbers.int()].view(len(packed), scale.shape[1], -1)
    return (weights * scale[..., None]).view(len(packed), -1)


# Accelerators run one kernel for it (bitsandbytes, torchao); the simulated device prices that kernel.
for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("dequantise_4bit", _dequantise, _key)
_LIBRARY.impl("dequantise_4bit", lambda x, scale: scale.new_empty((x.shape[0], 2 * x.shape[1])), "Meta")


def dequantise(packed: Tensor, scale: Tensor) -> Tensor:
    """Return weights, [out, in] in the scales' dtype, from uint8 [out, in / 2] and scales [out, in / 64]."""
    weights: Tensor = torch.ops.fsdpbench_workloads.dequantise_4bit(packed, scale)
    return weights


def quantise(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the nearest levels of `weight`, [out, in], packed, and their scales in `dtype`."""
    blocks = weight.detach().float().view(len(weight), -1, block_of(weight.shape[1]))
    scale = blocks.abs().amax(dim=-1).clamp_min(1e-12).to(dtype)
    levels = torch.tensor(LEVELS, device=weight.device)
    halfway = (levels[1:] + levels[:-1]) / 2
    numbers = torch.bucketize(blocks / scale.float()[..., None], halfway).view(len(weight), -1)
    return (numbers[:, ::2] * 16 + numbers[:, 1::2]).to(torch.uint8), scale


class FourBitProjection(Projection):
    """A frozen 4-bit linear layer, converted from `base`; scales and bias in `dtype`."""

    def __init__(self, base: Projection, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.std = base.in_features, base.out_features, base.std
        block = block_of(base.in_features)
        if base.weight.device.type in ("cpu", "cuda"):
            packed, scale = quantise(base.weight, dtype)
        else:
            packed = base.weight.new_empty((base.out_features, base.in_features // 2), dtype=torch.uint8)
            scale = base.weight.new_empty((base.out_features, base.in_features // block), dtype=dtype)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.weight_scale = nn.Parameter(scale, requires_grad=False)
        self.bias = base.bias

    def reset_parameters(self) -> None:
        """Draw levels uniformly, and set the scale that gives the layer's standard deviation."""
        reset_packed(self.weight, self.weight_scale, self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return four_bit_linear(x, self.weight, self.weight_scale, self.bias)


@torch.no_grad()
def reset_packed(packed: Tensor, scale: Tensor, std: float) -> None:
    """Draw levels in place, and set scales so that the weights have standard deviation `std`."""
    local = getattr(packed, "_local_tensor", packed)  # each shard draws its own bytes
    local.random_(0, 256)
    scale.fill_(std / _RMS)


def four_bit_linear(x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `F.linear` of x, [..., in], with 4-bit weights."""
    y: Tensor = _FourBitLinear.apply(x, packed, scale)
    return y if bias is None else y + bias


class _FourBitLinear(torch.autograd.Function):
    """Linear function that saves the packed weights for backward, not the dequantised ones."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
        """Return [..., out] for `x` [..., in] with packed 4-bit weights and their scales."""
        ctx.save_for_backward(packed, scale)
        return F.linear(x, dequantise(packed, scale))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        if not ctx.needs_input_grad[0]:
            return None, None, None
        return gradient @ dequantise(*ctx.saved_tensors), None, None


class AdaptedProjection(Projection):
    """A frozen linear layer, [..., in] to [..., out], plus an adapter."""

    def __init__(self, base: Projection, lora: Lora) -> None:
        nn.Module.__init__(self)  # weight and bias come from `base`
        self.in_features, self.out_features, self.std = base.in_features, base.out_features, base.std
        self.weight, self.bias = base.weight, base.bias
        self.weight_scale = base.weight_scale if isinstance(base, FourBitProjection) else None
        self.scale = _ALPHA_OF_RANK
        self.bias_share = 1.0
        self.lora_a = nn.Parameter(torch.empty(lora.rank, base.in_features, dtype=torch.float32))
        self.lora_b = nn.Parameter(torch.empty(base.out_features, lora.rank, dtype=torch.float32))
        self._reset_adapter()

    def reset_parameters(self) -> None:
        """Draw the frozen layer's weights, and reset the adapter so that it has no effect."""
        if self.weight_scale is None:
            super().reset_parameters()
        else:
            reset_packed(self.weight, self.weight_scale, self.std)
        self._reset_adapter()

    def _reset_adapter(self) -> None:
        nn.init.normal_(self.lora_a, std=1 / math.sqrt(self.in_features))
        nn.init.zeros_(self.lora_b)

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else held(self.bias)
        if bias is not None and self.bias_share != 1.0:  # the results of several ranks are summed
            bias = bias * self.bias_share
        if self.weight_scale is None:
            base = F.linear(x, held(self.weight), bias)
        else:
            base = four_bit_linear(x, held(self.weight), held(self.weight_scale), bias)
        return base + F.linear(F.linear(x, held(self.lora_a)), held(self.lora_b)) * self.scale


def adapt(model: nn.Module, block_classes: tuple[type[nn.Module], ...], lora: Lora) -> None:
    """Freeze `model` and add adapters to the linear layers of its blocks, in place."""
    dtype = DTYPES[lora.frozen_dtype]
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
        parameter.requires_grad_(False)

    def frozen(name: str, layer: Projection) -> Projection:
        base = FourBitProjection(layer, dtype) if lora.four_bit else layer
        return AdaptedProjection(base, lora) if lora.takes(name) else base

    replace_projections(model, block_classes, frozen)
