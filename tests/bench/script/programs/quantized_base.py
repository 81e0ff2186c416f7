"""A base in eight bits with adapters: buffers of int8 with scales, dequantised in forward, frozen and sharded."""

import torch
import torch.distributed as dist
from tiny import LENGTH, WIDTH
from torch import nn
from torch.distributed.fsdp import fully_shard


class QuantizedLinear(nn.Module):
    def __init__(self, linear, rank=4):
        super().__init__()
        weight = linear.weight.data
        scale = weight.abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter((weight / scale).round().to(torch.int8), requires_grad=False)
        self.register_buffer("scale", scale.to(torch.bfloat16))
        self.a = nn.Parameter(torch.randn(rank, linear.in_features) * 0.01)
        self.b = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x):
        base = nn.functional.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype))
        return base + (x @ self.a.to(x.dtype).t()) @ self.b.to(x.dtype).t()


dist.init_process_group("nccl")
torch.cuda.set_device(0)
layers = [QuantizedLinear(nn.Linear(WIDTH, WIDTH)) for _ in range(4)]
model = nn.Sequential(*layers).cuda()
ignored = {p for p in model.parameters() if not p.is_floating_point()}
for layer in model:
    fully_shard(layer, ignored_params=ignored)
fully_shard(model, ignored_params=ignored)
print(f"trainable {sum(p.numel() for p in model.parameters() if p.requires_grad)}")
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-4, weight_decay=0.0)
for _ in range(8):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(torch.randn(2, LENGTH, WIDTH, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
