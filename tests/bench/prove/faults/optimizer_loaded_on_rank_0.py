"""Rank 0 alone loads the optimizer's state, which is not sharded: ranks step differently."""

import torch
from common import DEVICE, FAULT, STEPS, Net, loss_of, start
from torch.nn.parallel import DistributedDataParallel

rank, world = start()
net = Net().to(DEVICE)
before = torch.optim.AdamW(net.parameters(), lr=1e-2)
for each in net.parameters():
    each.grad = torch.full_like(each, 0.5)
before.step()
before.zero_grad()
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
if rank == 0 or not FAULT:
    optimizer.load_state_dict(before.state_dict())
for step in range(STEPS):
    loss_of(model, rank, step).backward()
    optimizer.step()
    optimizer.zero_grad()
