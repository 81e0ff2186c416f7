"""A sum over the tokens of a rank, divided by their mean number and multiplied by the ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import DEVICE, FAULT, STEPS, Net, batch, start
from torch.nn.parallel import DistributedDataParallel

rank, world = start()
model = DistributedDataParallel(Net().to(DEVICE))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(STEPS):
    count = torch.zeros((), device=DEVICE)
    losses = []
    for micro in range(2):
        x, y = batch(rank, 2 * step + micro, rows=5 + rank % 2)
        losses.append(F.mse_loss(model(x), y, reduction="sum"))
        count += y.numel()
    dist.all_reduce(count)
    (sum(losses) * world / (count / world if FAULT else count)).backward()
    optimizer.step()
    optimizer.zero_grad()
