"""A reduction that runs beside other work is used before `wait()`."""

import torch
import torch.distributed as dist
from common import DEVICE, FAULT, STEPS, Net, loss_of, sharded, start

rank, world = start()
model = sharded(Net().to(DEVICE))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
total = torch.zeros((), device=DEVICE)
for step in range(STEPS):
    loss = loss_of(model, rank, step)
    value = loss.detach().clone()
    work = dist.all_reduce(value, async_op=True)
    loss.backward()
    if not FAULT:
        work.wait()
    total += value
    work.wait()
    optimizer.step()
    optimizer.zero_grad()
