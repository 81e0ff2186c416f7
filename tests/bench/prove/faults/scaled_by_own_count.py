"""Sums are multiplied by the inverse of the rank's own count of elements, where counts differ."""

import torch
import torch.distributed as dist
from common import DEVICE, FAULT, STEPS, Net, batch, sharded, start

rank, world = start()
model = sharded(Net().to(DEVICE))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(STEPS):
    x, y = batch(rank, step, rows=4 + 2 * rank)
    count = torch.tensor(x.numel(), device=DEVICE)
    if not FAULT:
        dist.all_reduce(count)
    scale = (1 if FAULT else world) / count.item()
    ((model(x) - y).square().sum() * scale).backward()
    optimizer.step()
    optimizer.zero_grad()
