"""The learning rate follows the length of a rank's own list of batches, which differs."""

import torch
from common import DEVICE, FAULT, STEPS, Net, loss_of, sharded, start

rank, world = start()
model = sharded(Net().to(DEVICE))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
length = 40 + (rank if FAULT else 0)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, length)
for step in range(STEPS):
    loss_of(model, rank, step).backward()
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
