"""FSDP1 offloads to the host, and a microbatch outside of `no_sync()` takes the place of the one before."""

import contextlib

import torch
from common import DEVICE, FAULT, STEPS, Net, loss_of, start
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel

rank, world = start()
model = FullyShardedDataParallel(Net().to(DEVICE), cpu_offload=CPUOffload(True))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(STEPS):
    for micro in range(2):
        with model.no_sync() if micro == 0 and not FAULT else contextlib.nullcontext():
            (loss_of(model, rank, 2 * step + micro) / 2).backward()
    optimizer.step()
    optimizer.zero_grad()
