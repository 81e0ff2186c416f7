"""Losses are added over ranks by a differentiable all-reduce, and not divided."""

import torch
from common import DEVICE, FAULT, STEPS, Net, loss_of, start
from torch.distributed.nn.functional import all_reduce
from torch.nn.parallel import DistributedDataParallel

rank, world = start()
model = DistributedDataParallel(Net().to(DEVICE))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(STEPS):
    loss = all_reduce(loss_of(model, rank, step))
    (loss if FAULT else loss / world).backward()
    optimizer.step()
    optimizer.zero_grad()
