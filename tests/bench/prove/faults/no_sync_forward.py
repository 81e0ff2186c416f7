"""The last microbatch's forward is inside of DDP's `no_sync()`, its backward is not: DDP asks in forward."""

import torch
from common import DEVICE, FAULT, STEPS, Net, loss_of, start
from torch.nn.parallel import DistributedDataParallel

rank, world = start()
model = DistributedDataParallel(Net().to(DEVICE))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(STEPS):
    with model.no_sync():
        (loss_of(model, rank, 2 * step) / 2).backward()
        last = loss_of(model, rank, 2 * step + 1) / 2 if FAULT else None
    if last is None:
        last = loss_of(model, rank, 2 * step + 1) / 2
    last.backward()
    optimizer.step()
    optimizer.zero_grad()
