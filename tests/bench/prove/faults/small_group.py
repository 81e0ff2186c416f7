"""A process group of half of the ranks instead of all of them."""

import torch
import torch.distributed as dist
from common import DEVICE, FAULT, STEPS, Net, loss_of, start
from torch.distributed.fsdp import FullyShardedDataParallel

rank, world = start()
halves = [dist.new_group(list(range(half * world // 2, (half + 1) * world // 2))) for half in range(2)]
group = halves[rank // (world // 2)] if FAULT else None
model = FullyShardedDataParallel(Net().to(DEVICE), process_group=group)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(STEPS):
    loss_of(model, rank, step).backward()
    optimizer.step()
    optimizer.zero_grad()
