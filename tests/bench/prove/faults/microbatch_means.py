"""Accumulated losses are means over different numbers of tokens: those of a short microbatch weigh more."""

import torch
import torch.nn.functional as F
from common import DEVICE, FAULT, STEPS, Net, batch, sharded, start

rank, world = start()
model = sharded(Net().to(DEVICE))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
ROWS = (3, 9)
for step in range(STEPS):
    for index, rows in enumerate(ROWS):
        model.set_requires_gradient_sync(index == len(ROWS) - 1)
        x, y = batch(rank, 10 * step + index, rows=rows)
        if FAULT:
            loss = F.mse_loss(model(x), y) / len(ROWS)
        else:
            loss = F.mse_loss(model(x), y, reduction="sum") / (sum(ROWS) * y.shape[1])
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
