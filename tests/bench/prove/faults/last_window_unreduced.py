"""The last window of an epoch has one microbatch less, and its last one is left in DDP's `no_sync()`."""

import contextlib

import torch
from common import DEVICE, FAULT, Net, loss_of, start
from torch.nn.parallel import DistributedDataParallel

EPOCHS, BATCHES, WINDOW = 3, 5, 2
rank, world = start()
model = DistributedDataParallel(Net().to(DEVICE))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for epoch in range(EPOCHS):
    for at in range(BATCHES):
        is_last = at + 1 == BATCHES
        steps = (at + 1) % WINDOW == 0 or is_last
        reduces = steps and not (FAULT and is_last)
        size = BATCHES % WINDOW if is_last else WINDOW
        with contextlib.nullcontext() if reduces else model.no_sync():
            (loss_of(model, rank, BATCHES * epoch + at) / size).backward()
        if steps:
            optimizer.step()
            optimizer.zero_grad()
