"""Gradients of FSDP1 are clipped by torch's function, which sees the norm of the rank's shard only."""

import torch
from common import DEVICE, FAULT, STEPS, Net, loss_of, start
from torch.distributed.fsdp import FullyShardedDataParallel

rank, world = start()
model = FullyShardedDataParallel(Net().to(DEVICE), use_orig_params=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(STEPS):
    loss_of(model, rank, step).backward()
    if FAULT:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    else:
        model.clip_grad_norm_(0.1)
    optimizer.step()
    optimizer.zero_grad()
