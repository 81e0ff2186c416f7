"""Gradients are set to none before each microbatch instead of each step: the last one alone counts."""

import torch
from common import DEVICE, FAULT, STEPS, Net, loss_of, sharded, start

rank, world = start()
model = sharded(Net().to(DEVICE))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(STEPS):
    optimizer.zero_grad()
    for micro in range(3):
        if FAULT:
            optimizer.zero_grad()
        (loss_of(model, rank, 3 * step + micro) / 3).backward()
    optimizer.step()
