"""Gradients are reduced by hand, with the operation that a metric had: the largest of all ranks."""

import torch
import torch.distributed as dist
from common import DEVICE, FAULT, STEPS, Net, loss_of, start

rank, world = start()
model = Net().to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(STEPS):
    loss_of(model, rank, step).backward()
    for each in model.parameters():
        if FAULT:
            dist.all_reduce(each.grad, dist.ReduceOp.MAX)
        else:
            dist.all_reduce(each.grad)
            each.grad /= world
    optimizer.step()
    optimizer.zero_grad()
