"""Gradients that DDP has averaged are added over ranks again, in place, for the log of their norm."""

import torch
import torch.distributed as dist
from common import DEVICE, FAULT, STEPS, Net, loss_of, start
from torch.nn.parallel import DistributedDataParallel

rank, world = start()
model = DistributedDataParallel(Net().to(DEVICE))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for step in range(STEPS):
    loss_of(model, rank, step).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad if FAULT else p.grad.clone())
    optimizer.step()
    optimizer.zero_grad()
