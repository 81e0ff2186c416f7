"""The layer that multiplies in 8 or 4 bits, and the layers of a model that become one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fsdpbench.workloads.base import Workload
from fsdpbench.workloads.layers import ROUTERS, Projection, replace_projections
from fsdpbench.workloads.narrow.blocks import MX_BLOCK, NV_BLOCK, MxLinear, Nvfp4Linear
from fsdpbench.workloads.narrow.eight_bits import MULTIPLE, EightBitLinear
from fsdpbench.workloads.shape import WorkloadError
from fsdpbench.workloads.tensor_plan import HasProducts

NARROW = ("fp8", "mxfp8", "nvfp4")
_MULTIPLES = {"fp8": MULTIPLE, "mxfp8": MX_BLOCK, "nvfp4": NV_BLOCK}
_LINEARS = {"fp8": EightBitLinear, "mxfp8": MxLinear, "nvfp4": Nvfp4Linear}


class NarrowProjection(Projection):
    """A linear layer with its products, forward and backward, in `kind`, and weight and bias of `base`."""

    def __init__(self, base: Projection, kind: str) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.std = base.in_features, base.out_features, base.std
        self.weight, self.bias, self.kind = base.weight, base.bias, kind

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        y: Tensor = _LINEARS[self.kind].apply(x, self.weight)
        return y if self.bias is None else y + self.bias.to(y.dtype)


def narrow(model: nn.Module, block_classes: tuple[type[nn.Module], ...], kind: str) -> None:
    """Let the linear layers of the blocks, routers aside, multiply in `kind`, in place."""
    replace_projections(model, block_classes, lambda name, layer: NarrowProjection(layer, kind))


def check_narrow(workload: Workload, kind: str, batch: int, seq: int | None) -> None:
    """Raise `WorkloadError` if a layer cannot be multiplied in `kind`; the message names it."""
    if not isinstance(workload, HasProducts):
        raise WorkloadError(
            f"{workload.name} is of the family {workload.family}, whose layers are not built in {kind}; "
            "the families decoder, llama and gpt are"
        )
    if workload.shape.get("experts") and "M" in str(workload.shape.get("moe_pattern")):
        raise WorkloadError(f"experts' products of groups are not built in {kind}: take a dense model")
    multiple = _MULTIPLES[kind]
    products = [product for layer in range(workload.block_count) for product in workload.products(layer)]
    for product in products:
        if product.name not in ROUTERS and (product.inputs % multiple or product.outputs % multiple):
            raise WorkloadError(
                f"layer {product.name} of {workload.name} is {product.inputs} x {product.outputs}, and "
                f"{kind} needs multiples of {multiple}: change the shape"
            )
    tokens = workload.tokens(batch, seq) or 0
    if tokens % multiple:
        raise WorkloadError(
            f"{tokens} tokens a microbatch are summed over for weights' gradients, and {kind} needs a "
            f"multiple of {multiple}: change batch or seq"
        )
