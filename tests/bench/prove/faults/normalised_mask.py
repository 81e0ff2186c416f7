"""A mask that adds up to 1 on each rank, where ranks have different numbers of valid tokens."""

import torch
import torch.distributed as dist
from common import DEVICE, FAULT, STEPS, Net, batch, sharded, start

rank, world = start()
model = sharded(Net().to(DEVICE))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for step in range(STEPS):
    x, y = batch(rank, step)
    mask = (torch.arange(len(x), device=DEVICE) <= rank).float()
    count = mask.sum()
    if not FAULT:
        dist.all_reduce(count, op=dist.ReduceOp.AVG)
    errors = (model(x) - y).square().mean(1)
    (errors * (mask / count)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
