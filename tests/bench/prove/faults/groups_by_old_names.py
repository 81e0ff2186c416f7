"""Groups of the optimizer are chosen by names that the wrapper changed: the head has no rate of its own."""

import torch
from common import DEVICE, FAULT, STEPS, Net, loss_of, start
from torch.nn.parallel import DistributedDataParallel

rank, world = start()
model = DistributedDataParallel(Net().to(DEVICE))
named = dict((model if FAULT else model.module).named_parameters())
head = [each for name, each in named.items() if name.startswith("head.")]
rest = [each for name, each in named.items() if not name.startswith("head.")]
groups = [{"params": rest, "lr": 1e-3}, *([{"params": head, "lr": 1e-2}] if head else [])]
optimizer = torch.optim.AdamW(groups)
for step in range(STEPS):
    loss_of(model, rank, step).backward()
    optimizer.step()
    optimizer.zero_grad()
