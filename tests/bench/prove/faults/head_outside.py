"""DDP wraps the backbone only: the gradients of the head, a module of its own, are not reduced."""

import itertools

import torch
import torch.nn.functional as F
from common import DEVICE, FAULT, STEPS, WIDTH, Net, batch, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel

rank, world = start()
backbone = DistributedDataParallel(Net().to(DEVICE))
head = nn.Linear(WIDTH, WIDTH).to(DEVICE)
head = head if FAULT else DistributedDataParallel(head)
optimizer = torch.optim.AdamW(itertools.chain(backbone.parameters(), head.parameters()), lr=1e-3)
for step in range(STEPS):
    x, y = batch(rank, step)
    F.mse_loss(head(backbone(x)), y).backward()
    optimizer.step()
    optimizer.zero_grad()
