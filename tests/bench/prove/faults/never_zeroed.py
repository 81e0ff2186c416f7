"""Gradients of the step before are never taken away: `zero_grad` is called on a copy of the model."""

import copy

import torch
from common import DEVICE, FAULT, STEPS, Net, loss_of, start
from torch.nn.parallel import DistributedDataParallel

rank, world = start()
net = Net().to(DEVICE)
model = DistributedDataParallel(net)
other = copy.deepcopy(net) if FAULT else net
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(STEPS):
    loss_of(model, rank, step).backward()
    optimizer.step()
    other.zero_grad()
