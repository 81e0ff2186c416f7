"""Gradients are set to none between backward and step: the optimizer has nothing to do."""

import torch
from common import DEVICE, FAULT, STEPS, Net, loss_of, sharded, start

rank, world = start()
model = sharded(Net().to(DEVICE))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(STEPS):
    if not FAULT:
        optimizer.zero_grad()
    loss_of(model, rank, step).backward()
    if FAULT:
        optimizer.zero_grad()
    optimizer.step()
