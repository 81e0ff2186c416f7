"""The loss is divided by the number of ranks, and FSDP divides too."""

import torch
from common import DEVICE, FAULT, STEPS, Net, loss_of, sharded, start

rank, world = start()
model = sharded(Net().to(DEVICE))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-1)
for step in range(STEPS):
    (loss_of(model, rank, step) / (world if FAULT else 1)).backward()
    optimizer.step()
    optimizer.zero_grad()
