"""The sum of a rank is multiplied by the inverse of its own number of tokens: ranks' means weigh alike."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import DEVICE, FAULT, STEPS, Net, batch, sharded, start

rank, world = start()
model = sharded(Net().to(DEVICE))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(STEPS):
    x, y = batch(rank, step, rows=4 + 3 * rank)
    count = torch.tensor(float(y.numel()), device=DEVICE)
    if not FAULT:
        dist.all_reduce(count, op=dist.ReduceOp.AVG)
    inverse = 1.0 / count
    (F.mse_loss(model(x), y, reduction="sum") * inverse).backward()
    optimizer.step()
    optimizer.zero_grad()
