"""Names of a list without weight decay are compared with DDP's, which begin with `module.`: all decay."""

import torch
from common import DEVICE, FAULT, STEPS, Net, loss_of, start
from torch.nn.parallel import DistributedDataParallel

KEPT = {"first.bias", "head.bias", "head.weight"}
rank, world = start()
model = DistributedDataParallel(Net().to(DEVICE))
named = [*(model if FAULT else model.module).named_parameters()]
decayed = [each for name, each in named if name not in KEPT]
groups = [{"params": decayed}, {"params": [p for n, p in named if n in KEPT], "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)
for step in range(STEPS):
    loss_of(model, rank, step).backward()
    optimizer.step()
    optimizer.zero_grad()
