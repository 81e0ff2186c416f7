"""Ranks with different numbers of valid tokens: the mean of their means is not the mean over tokens."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import DEVICE, FAULT, STEPS, Net, batch, sharded, start

rank, world = start()
model = sharded(Net().to(DEVICE))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for step in range(STEPS):
    x, y = batch(rank, step, rows=4 + 3 * rank)
    error = F.mse_loss(model(x), y, reduction="sum")
    count = torch.tensor(float(y.numel()), device=DEVICE)
    if not FAULT:
        dist.all_reduce(count, op=dist.ReduceOp.AVG)
    (error / count).backward()
    optimizer.step()
    optimizer.zero_grad()
