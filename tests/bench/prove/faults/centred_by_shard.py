"""The mean of each column is taken from gradients, as in centralised steps: that of a rank's rows."""

import torch
from common import DEVICE, FAULT, STEPS, Net, loss_of, sharded, start

rank, world = start()
model = sharded(Net().to(DEVICE))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-1)
for step in range(STEPS):
    loss_of(model, rank, step).backward()
    for each in model.parameters():
        gradient = each.grad.to_local()
        if gradient.ndim > 1:
            gradient -= gradient.mean(0 if FAULT else 1, keepdim=True)
    optimizer.step()
    optimizer.zero_grad()
