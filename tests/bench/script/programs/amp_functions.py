"""Custom autograd functions with custom_fwd, once_differentiable, needs_input_grad, and saved-tensor hooks."""

import torch
import torch.distributed as dist
from tiny import LENGTH, WIDTH
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import fully_shard


class Product(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.bfloat16)
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    @once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        to_x = grad @ weight if ctx.needs_input_grad[0] else None
        to_weight = grad.flatten(0, 1).t() @ x.flatten(0, 1) if ctx.needs_input_grad[1] else None
        return to_x, to_weight


class Scaled(torch.autograd.Function):
    @staticmethod
    @torch.cuda.amp.custom_fwd
    def forward(ctx, x, factor):
        ctx.factor = factor
        ctx.mark_non_differentiable()
        return x.view_as(x)

    @staticmethod
    @torch.cuda.amp.custom_bwd
    def backward(ctx, grad):
        return grad * ctx.factor, None


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.02)
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, x):
        return x + Scaled.apply(nn.functional.silu(Product.apply(self.norm(x), self.weight)), 0.5)


dist.init_process_group("nccl")
model = nn.Sequential(*(Layer() for _ in range(4))).cuda()
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.RAdam(model.parameters())
for step in range(8):
    x = torch.randn(2, LENGTH, WIDTH, device="cuda")
    with torch.autocast("cuda", torch.bfloat16), torch.autograd.graph.save_on_cpu(pin_memory=step % 2 == 0):
        loss = model(x).float().pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
