"""Rank 0 alone evaluates: its all-gathers wait for ranks that never come."""

import torch
from common import DEVICE, FAULT, STEPS, Net, batch, loss_of, sharded, start

rank, world = start()
model = sharded(Net().to(DEVICE))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(STEPS):
    loss_of(model, rank, step).backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 or not FAULT:
        with torch.no_grad():
            model(batch(0, 99)[0])
