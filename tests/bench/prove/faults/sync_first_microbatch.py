"""Gradients are synchronised in the first microbatch instead of the last."""

import torch
from common import DEVICE, FAULT, STEPS, Net, loss_of, sharded, start

rank, world = start()
model = sharded(Net().to(DEVICE))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(STEPS):
    for micro in range(3):
        model.set_requires_gradient_sync(micro == (0 if FAULT else 2))
        (loss_of(model, rank, 3 * step + micro) / 3).backward()
    optimizer.step()
    optimizer.zero_grad()
