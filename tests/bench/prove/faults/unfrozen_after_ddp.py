"""Blocks are frozen while DDP wraps, and trained after the first step: DDP does not know of them."""

import torch
from common import DEVICE, FAULT, STEPS, Net, loss_of, start
from torch.nn.parallel import DistributedDataParallel

rank, world = start()
net = Net().to(DEVICE)
net.blocks.requires_grad_(False)
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
for step in range(STEPS):
    if step == 1:
        net.blocks.requires_grad_(True)
        if not FAULT:
            model = DistributedDataParallel(net)
    loss_of(model, rank, step).backward()
    optimizer.step()
    optimizer.zero_grad()
