"""DDP's `no_sync()` is left on in the last microbatch."""

import contextlib

import torch
from common import DEVICE, FAULT, STEPS, Net, loss_of, start
from torch.nn.parallel import DistributedDataParallel

rank, world = start()
model = DistributedDataParallel(Net().to(DEVICE))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(STEPS):
    for micro in range(2):
        quiet = micro == 1 if FAULT else micro == 0
        with model.no_sync() if quiet else contextlib.nullcontext():
            (loss_of(model, rank, 2 * step + micro) / 2).backward()
    optimizer.step()
    optimizer.zero_grad()
