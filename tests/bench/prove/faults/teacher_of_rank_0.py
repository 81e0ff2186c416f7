"""The moving average that teaches is made on rank 0 alone: other ranks learn from the first one."""

import copy

import torch
import torch.nn.functional as F
from common import DEVICE, FAULT, STEPS, Net, batch, start
from torch.nn.parallel import DistributedDataParallel

rank, world = start()
net = Net().to(DEVICE)
teacher = copy.deepcopy(net).requires_grad_(False)
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(STEPS):
    x, y = batch(rank, step)
    out = model(x)
    (F.mse_loss(out, y) + F.mse_loss(out, teacher(x))).backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 or not FAULT:
        with torch.no_grad():
            for own, each in zip(teacher.parameters(), net.parameters(), strict=True):
                own.lerp_(each, 0.1)
