"""Experts are left to the script, which adds their gradients over ranks and does not divide."""

import torch
import torch.distributed as dist
from common import DEVICE, FAULT, STEPS, Net, loss_of, start
from torch.distributed.fsdp import fully_shard

rank, world = start()
model = Net().to(DEVICE)
expert = model.blocks[1]
fully_shard(model.blocks[0])
fully_shard(model, ignored_params=set(expert.parameters()))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, foreach=False)
for step in range(STEPS):
    loss_of(model, rank, step).backward()
    for parameter in expert.parameters():
        dist.all_reduce(parameter.grad)
        if not FAULT:
            parameter.grad /= world
    optimizer.step()
    optimizer.zero_grad()
