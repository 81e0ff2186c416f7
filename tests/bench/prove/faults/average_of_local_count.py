"""A moving average whose decay follows the samples that a rank has read: each shard has its own average."""

import torch
from common import DEVICE, FAULT, STEPS, Net, loss_of, sharded, start

rank, world = start()
model, average = sharded(Net().to(DEVICE)), sharded(Net().to(DEVICE)).requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
seen = 0
for step in range(STEPS):
    loss_of(model, rank, step).backward()
    optimizer.step()
    optimizer.zero_grad()
    seen += 6 + rank if FAULT else 6
    with torch.no_grad():
        for own, each in zip(average.parameters(), model.parameters(), strict=True):
            own.lerp_(each, 1 / (1 + seen))
