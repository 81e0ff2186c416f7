"""Frozen after a first step, with gradients of zero instead of none: weight decay and momentum continue."""

import torch
from common import DEVICE, FAULT, STEPS, Net, loss_of, sharded, start

rank, world = start()
model = sharded(Net().to(DEVICE))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(STEPS):
    if step == 1:
        model.first.requires_grad_(False)
    loss_of(model, rank, step).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=not FAULT)
