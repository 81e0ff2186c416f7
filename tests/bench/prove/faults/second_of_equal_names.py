"""A critic whose parameters have the actor's names is left out of DDP; their optimizers step alternately."""

import torch
import torch.nn.functional as F
from common import DEVICE, FAULT, STEPS, Net, batch, start
from torch.nn.parallel import DistributedDataParallel

rank, world = start()
actor = DistributedDataParallel(Net().to(DEVICE))
critic = Net().to(DEVICE) if FAULT else DistributedDataParallel(Net().to(DEVICE))
acts, judges = (torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (actor, critic))
for step in range(STEPS):
    x, y = batch(rank, step)
    action, value = actor(x), critic(x)
    acts.zero_grad()
    F.mse_loss(action, y - value.detach()).backward()
    acts.step()
    judges.zero_grad()
    F.mse_loss(value, y).backward()
    judges.step()
