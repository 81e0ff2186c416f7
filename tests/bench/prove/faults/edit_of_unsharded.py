"""Weights are normalised between `unshard()` and `reshard()`: the change is lost."""

import torch
import torch.nn.functional as F
from common import DEVICE, FAULT, STEPS, Net, loss_of, sharded, start

rank, world = start()
model = sharded(Net().to(DEVICE))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(STEPS):
    loss_of(model, rank, step).backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        if FAULT:
            model.unshard()
        weight = model.head.weight
        weight.copy_(F.normalize(weight, dim=1))
        if FAULT:
            model.reshard()
