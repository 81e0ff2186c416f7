"""The loss is multiplied by the number of ranks, as if FSDP's mean were to be undone."""

import torch
from common import DEVICE, FAULT, STEPS, Net, loss_of, sharded, start

rank, world = start()
model = sharded(Net().to(DEVICE))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(STEPS):
    loss = loss_of(model, rank, step)
    (loss * world if FAULT else loss).backward()
    optimizer.step()
    optimizer.zero_grad()
