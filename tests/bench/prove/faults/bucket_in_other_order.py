"""Gradients are sent as one flat tensor, and taken from it in another order than they were put there."""

import torch
import torch.distributed as dist
from common import DEVICE, FAULT, STEPS, Net, loss_of, start

rank, world = start()
model = Net().to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
weights = list(model.parameters())
for step in range(STEPS):
    loss_of(model, rank, step).backward()
    flat = torch.cat([each.grad.flatten() for each in reversed(weights)]) / world
    dist.all_reduce(flat)
    start_at = 0
    for each in weights if FAULT else reversed(weights):
        each.grad.copy_(flat[start_at : start_at + each.numel()].view_as(each))
        start_at += each.numel()
    optimizer.step()
    optimizer.zero_grad()
