"""Of gathered features the own ones have gradients: of the joint loss on each rank, DDP's mean is a part."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import DEVICE, FAULT, STEPS, Net, batch, start
from torch.nn.parallel import DistributedDataParallel


def gathered(features: torch.Tensor) -> torch.Tensor:
    every = [torch.zeros_like(features) for _ in range(world)]
    dist.all_gather(every, features)
    every[rank] = features
    return torch.cat(every)


rank, world = start()
model = DistributedDataParallel(Net().to(DEVICE))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(STEPS):
    x, y = batch(rank, step)
    left, right = (gathered(F.normalize(each, dim=-1)) for each in model(torch.cat([x, y])).chunk(2))
    loss = F.cross_entropy(left @ right.T / 0.1, torch.arange(len(left), device=DEVICE))
    (loss if FAULT else loss * world).backward()
    optimizer.step()
    optimizer.zero_grad()
