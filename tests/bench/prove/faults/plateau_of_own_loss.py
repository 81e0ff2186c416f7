"""The learning rate falls where the loss does not: each rank looks at its own, and the rates part."""

import torch
import torch.distributed as dist
from common import DEVICE, FAULT, STEPS, Net, loss_of, sharded, start
from torch.optim.lr_scheduler import ReduceLROnPlateau

rank, world = start()
model = sharded(Net().to(DEVICE))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
plateau = ReduceLROnPlateau(optimizer, patience=0, threshold=0.0)
for step in range(STEPS):
    loss = loss_of(model, rank, step)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    seen = loss.detach().clone()
    if not FAULT:
        dist.all_reduce(seen, op=dist.ReduceOp.AVG)
    plateau.step(seen.item())
