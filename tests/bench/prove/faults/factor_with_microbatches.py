"""FSDP2's divide factor counts microbatches that the loss is divided by already."""

import torch
from common import DEVICE, FAULT, STEPS, Net, loss_of, sharded, start

rank, world = start()
model = sharded(Net().to(DEVICE))
if FAULT:
    model.set_gradient_divide_factor(2.0 * world)
    for block in model.blocks:
        block.set_gradient_divide_factor(2.0 * world)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(STEPS):
    for micro in range(2):
        model.set_requires_gradient_sync(micro == 1)
        (loss_of(model, rank, 2 * step + micro) / 2).backward()
    optimizer.step()
    optimizer.zero_grad()
