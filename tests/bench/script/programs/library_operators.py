"""Operators of torch.library: custom_op with register_autograd, a triton-free fused op, and an old Library."""

import torch
import torch.distributed as dist
from tiny import LENGTH, WIDTH
from torch import nn
from torch.distributed.fsdp import fully_shard


@torch.library.custom_op("mine::gated", mutates_args=())
def gated(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(gate)


@gated.register_fake
def _(x, gate):
    return torch.empty_like(x)


def setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def backward(ctx, grad):
    x, gate = ctx.saved_tensors
    s = torch.sigmoid(gate)
    return grad * s, grad * x * s * (1 - s)


gated.register_autograd(backward, setup_context=setup)
library = torch.library.Library("older", "DEF")
library.define("twice(Tensor x) -> Tensor")
library.impl("twice", lambda x: x + x, "CompositeImplicitAutograd")


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x):
        return x + torch.ops.older.twice(gated(*self.up(x).chunk(2, -1)))


dist.init_process_group("nccl")
model = nn.Sequential(*(Layer() for _ in range(3))).cuda()
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(8):
    model(torch.randn(2, LENGTH, WIDTH, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
