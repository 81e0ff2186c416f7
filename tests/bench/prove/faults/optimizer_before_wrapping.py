"""The optimizer is made before wrapping, which replaces the parameters: the model never changes."""

import torch
from common import DEVICE, FAULT, STEPS, Net, loss_of, sharded, start

rank, world = start()
model = Net().to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model = sharded(model)
if not FAULT:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(STEPS):
    loss_of(model, rank, step).backward()
    optimizer.step()
    optimizer.zero_grad()
    model.zero_grad()
