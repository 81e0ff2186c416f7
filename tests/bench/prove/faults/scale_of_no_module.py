"""A temperature that is a parameter of no module: DDP does not know it, and each rank trains its own."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import DEVICE, FAULT, STEPS, Net, batch, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel

rank, world = start()
model = DistributedDataParallel(Net().to(DEVICE))
scale = nn.Parameter(torch.ones((), device=DEVICE))
optimizer = torch.optim.SGD([*model.parameters(), scale], lr=1e-2)
for step in range(STEPS):
    x, y = batch(rank, step)
    F.mse_loss(model(x) * scale, y).backward()
    if not FAULT:
        dist.all_reduce(scale.grad)
        scale.grad /= world
    optimizer.step()
    optimizer.zero_grad()
