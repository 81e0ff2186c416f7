"""Features of all ranks are gathered without their gradients: negatives of other ranks push nothing."""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
import torch.nn.functional as F
from common import DEVICE, FAULT, STEPS, Net, batch, start
from torch.nn.parallel import DistributedDataParallel


def gathered(features: torch.Tensor) -> torch.Tensor:
    if not FAULT:
        return torch.cat(differentiable.all_gather(features))
    every = [torch.zeros_like(features) for _ in range(world)]
    dist.all_gather(every, features)
    return torch.cat(every)


rank, world = start()
model = DistributedDataParallel(Net().to(DEVICE))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(STEPS):
    x, y = batch(rank, step)
    left, right = F.normalize(model(torch.cat([x, y])), dim=-1).chunk(2)
    target = torch.arange(len(x), device=DEVICE) + rank * len(x)
    F.cross_entropy(left @ gathered(right).T / 0.1, target).backward()
    optimizer.step()
    optimizer.zero_grad()
