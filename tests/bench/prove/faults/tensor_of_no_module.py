"""A temperature that is trained belongs to no module, so DDP does not reduce its gradient."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import DEVICE, FAULT, STEPS, Net, batch, start
from torch.nn.parallel import DistributedDataParallel

rank, world = start()
model = DistributedDataParallel(Net().to(DEVICE))
temperature = torch.zeros((), device=DEVICE, requires_grad=True)
optimizer = torch.optim.AdamW([*model.parameters(), temperature], lr=1e-2)
for step in range(STEPS):
    x, y = batch(rank, step)
    F.mse_loss(model(x) * temperature.exp(), y).backward()
    if not FAULT:
        dist.all_reduce(temperature.grad, op=dist.ReduceOp.AVG)
    optimizer.step()
    optimizer.zero_grad()
