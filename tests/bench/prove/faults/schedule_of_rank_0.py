"""The learning rate is warmed up on rank 0 alone, beside its log."""

import torch
from common import DEVICE, FAULT, STEPS, Net, loss_of, sharded, start

rank, world = start()
model = sharded(Net().to(DEVICE))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
for step in range(STEPS):
    loss_of(model, rank, step).backward()
    optimizer.step()
    if not FAULT or rank == 0:
        schedule.step()
        print(step, schedule.get_last_lr())
    optimizer.zero_grad()
