"""A rank whose own loss is large skips the step: its shards stay, the others' move."""

import torch
import torch.distributed as dist
from common import DEVICE, FAULT, STEPS, Net, loss_of, sharded, start

rank, world = start()
model = sharded(Net().to(DEVICE))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(STEPS):
    loss = loss_of(model, rank, step)
    loss.backward()
    large = loss.detach() * (1 + 9 * (rank == 1 and step == 1))
    if not FAULT:
        dist.all_reduce(large, op=dist.ReduceOp.MAX)
    if float(large) < 20:
        optimizer.step()
    optimizer.zero_grad()
