"""The module inside of DDP is called, and DDP does not learn of the forward: no gradient is reduced."""

import torch
from common import DEVICE, FAULT, STEPS, Net, loss_of, start
from torch.nn.parallel import DistributedDataParallel

rank, world = start()
model = DistributedDataParallel(Net().to(DEVICE))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(STEPS):
    loss_of(model.module if FAULT else model, rank, step).backward()
    optimizer.step()
    optimizer.zero_grad()
