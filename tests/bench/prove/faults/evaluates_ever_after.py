"""Rank 0 evaluates once, and its module stays in evaluation: its dropout is off, and its norms learn no statistics."""

import torch
from common import DEVICE, FAULT, STEPS, Net, loss_of, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel

rank, world = start()
net = Net()
net.head = nn.Sequential(nn.Dropout(0.1), net.head)
model = DistributedDataParallel(net.to(DEVICE))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(STEPS):
    loss_of(model, rank, step).backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 0 and rank == 0:
        net.eval()
        with torch.no_grad():
            print(float(loss_of(net, rank, 99)))
        if not FAULT:
            net.train()
