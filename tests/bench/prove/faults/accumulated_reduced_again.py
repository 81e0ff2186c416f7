"""Gradients are summed over ranks by hand after every microbatch: what was summed before is summed again."""

import torch
import torch.distributed as dist
from common import DEVICE, FAULT, STEPS, Net, loss_of, start

rank, world = start()
model = Net().to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(STEPS):
    for micro in range(2):
        (loss_of(model, rank, 2 * step + micro) / 2 / world).backward()
        for each in model.parameters() if FAULT or micro == 1 else ():
            dist.all_reduce(each.grad)
    optimizer.step()
    optimizer.zero_grad()
