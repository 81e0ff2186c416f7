"""Weights are normalised in `summon_full_params(writeback=False)`: the change is lost."""

import torch
from common import DEVICE, FAULT, STEPS, Net, loss_of, start
from torch.distributed.fsdp import FullyShardedDataParallel

rank, world = start()
model = FullyShardedDataParallel(Net().to(DEVICE), use_orig_params=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(STEPS):
    loss_of(model, rank, step).backward()
    optimizer.step()
    optimizer.zero_grad()
    with FullyShardedDataParallel.summon_full_params(model, writeback=not FAULT), torch.no_grad():
        model.head.weight.div_(model.head.weight.norm(dim=1, keepdim=True))
