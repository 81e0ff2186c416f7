"""Backward begins with the inverse of the rank's own number of targets instead of a mean of all ranks'."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import DEVICE, FAULT, STEPS, Net, batch, start
from torch.nn.parallel import DistributedDataParallel

rank, world = start()
model = DistributedDataParallel(Net().to(DEVICE))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(STEPS):
    x, _ = batch(rank, step, rows=10)
    target = torch.arange(10, device=DEVICE)
    target[4 + rank + step % 2 :] = -100
    count = (target >= 0).sum().float()
    if not FAULT:
        dist.all_reduce(count)
        count /= world
    loss = F.cross_entropy(model(x), target, reduction="sum")
    loss.backward(gradient=1 / count)
    optimizer.step()
    optimizer.zero_grad()
