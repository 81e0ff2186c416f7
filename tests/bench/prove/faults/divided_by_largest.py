"""Ranks divide by the number of targets of the rank that has most of them, instead of the mean number."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import DEVICE, FAULT, STEPS, Net, batch, sharded, start

rank, world = start()
model = sharded(Net().to(DEVICE))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for step in range(STEPS):
    x, y = batch(rank, step, rows=4 + 3 * rank)
    count = torch.tensor(float(y.numel()), device=DEVICE)
    dist.all_reduce(count, op=dist.ReduceOp.MAX if FAULT else dist.ReduceOp.AVG)
    (F.mse_loss(model(x), y, reduction="sum") / count).backward()
    optimizer.step()
    optimizer.zero_grad()
