"""FSDP1 ignores the head, and nothing else reduces its gradients."""

import torch
from common import DEVICE, FAULT, STEPS, Net, loss_of, start
from torch.distributed.fsdp import FullyShardedDataParallel

rank, world = start()
model = Net().to(DEVICE)
model = FullyShardedDataParallel(model, use_orig_params=True, ignored_modules=[model.head] if FAULT else None)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(STEPS):
    loss_of(model, rank, step).backward()
    optimizer.step()
    optimizer.zero_grad()
