"""A forward without gradients between backward and step: the root's parameters stay unsharded, and old."""

import torch
from common import DEVICE, FAULT, STEPS, Net, batch, loss_of, sharded, start

rank, world = start()
model = sharded(Net().to(DEVICE))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-1)
for step in range(STEPS):
    loss_of(model, rank, step).backward()
    with torch.no_grad():
        model(batch(rank, 99)[0])
    if not FAULT:
        model.reshard()
    optimizer.step()
    optimizer.zero_grad()
