"""A sum over all ranks is divided by the ranks of one node."""

import os

import torch
import torch.distributed as dist
from common import DEVICE, FAULT, STEPS, Net, loss_of, start

rank, world = start()
model = Net().to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(STEPS):
    loss_of(model, rank, step).backward()
    for each in model.parameters():
        dist.all_reduce(each.grad)
        each.grad /= int(os.environ["LOCAL_WORLD_SIZE"]) if FAULT else world
    optimizer.step()
    optimizer.zero_grad()
