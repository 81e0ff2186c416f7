"""A divide factor of 1, though each rank's loss is a mean."""

import torch
from common import DEVICE, FAULT, STEPS, Net, loss_of, sharded, start

rank, world = start()
model = sharded(Net().to(DEVICE))
for module in model.modules():
    if FAULT and hasattr(module, "set_gradient_divide_factor"):
        module.set_gradient_divide_factor(1.0)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for step in range(STEPS):
    loss_of(model, rank, step).backward()
    optimizer.step()
    optimizer.zero_grad()
