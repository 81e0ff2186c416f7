"""Losses of tokens times their mask times the inverse of its sum, which is not the same on all ranks."""

import torch
import torch.distributed as dist
from common import DEVICE, FAULT, STEPS, Net, batch, start
from torch.nn.parallel import DistributedDataParallel

rank, world = start()
model = DistributedDataParallel(Net().to(DEVICE))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(STEPS):
    x, y = batch(rank, step, rows=12)
    mask = (torch.arange(12, device=DEVICE) < 3 + 2 * rank + step).float()
    valid = mask.sum()
    if not FAULT:
        dist.all_reduce(valid, op=dist.ReduceOp.AVG)
    loss = ((model(x) - y).square().mean(-1) * mask).sum() * valid.reciprocal()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
