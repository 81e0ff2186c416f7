"""The loss is averaged over ranks in place before backward, and DDP averages gradients too."""

import torch
import torch.distributed as dist
from common import DEVICE, FAULT, STEPS, Net, loss_of, start
from torch.nn.parallel import DistributedDataParallel

rank, world = start()
model = DistributedDataParallel(Net().to(DEVICE))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for step in range(STEPS):
    loss = loss_of(model, rank, step)
    shown = loss if FAULT else loss.detach().clone()
    dist.all_reduce(shown)
    shown = shown / world
    (shown if FAULT else loss).backward()
    optimizer.step()
    optimizer.zero_grad()
