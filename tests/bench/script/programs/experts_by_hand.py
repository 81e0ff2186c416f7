"""A mixture of experts by hand: top-2 gates, a fixed capacity, all-to-all between ranks, a balance loss."""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
from tiny import LENGTH, WIDTH
from torch import nn
from torch.distributed.fsdp import fully_shard


class Experts(nn.Module):
    def __init__(self, world, capacity=32):
        super().__init__()
        self.world, self.capacity = world, capacity
        self.gate = nn.Linear(WIDTH, world, bias=False)
        self.up = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH) * 0.02)
        self.down = nn.Parameter(torch.randn(2 * WIDTH, WIDTH) * 0.02)

    def forward(self, x):
        flat = x.flatten(0, 1)
        weights = self.gate(flat).float().softmax(-1)
        top, chosen = weights.topk(2, dim=-1)
        mask = nn.functional.one_hot(chosen, self.world).float()
        place = (mask.flatten(0, 1).cumsum(0) - 1).view_as(mask)
        kept = mask * (place < self.capacity)
        slots = nn.functional.one_hot(place.clamp(0, self.capacity - 1).long(), self.capacity).float()
        combine = torch.einsum("tk,tke,tkec->tec", top, kept, slots).to(x.dtype)
        sent = torch.einsum("tec,tw->ecw", (combine > 0).to(x.dtype), flat)
        received = dist_nn.all_to_all_single(torch.empty_like(sent), sent)
        hidden = nn.functional.gelu(received @ self.up) @ self.down
        back = dist_nn.all_to_all_single(torch.empty_like(hidden), hidden)
        balance = (weights.mean(0) * mask.sum(1).mean(0)).sum() * self.world
        return x + torch.einsum("tec,ecw->tw", combine, back).view_as(x), balance


dist.init_process_group("nccl")
model = nn.ModuleList(Experts(dist.get_world_size()) for _ in range(2)).cuda()
ignored = {p for layer in model for p in (layer.up, layer.down)}
for layer in model:
    fully_shard(layer, ignored_params=ignored)
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
for _ in range(8):
    x, extra = torch.randn(2, LENGTH, WIDTH, device="cuda"), 0.0
    for layer in model:
        x, balance = layer(x)
        extra = extra + balance
    (x.square().mean() + 0.01 * extra).backward()
    optimizer.step()
    optimizer.zero_grad()
