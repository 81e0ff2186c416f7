"""Features are gathered into one tensor for a loss of all pairs, which so has no gradient of others."""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
import torch.nn.functional as F
from common import DEVICE, FAULT, STEPS, WIDTH, Net, batch, sharded, start

rank, world = start()
model = sharded(Net().to(DEVICE))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for step in range(STEPS):
    x, _ = batch(rank, step)
    features = F.normalize(model(x), dim=-1)
    if FAULT:
        every = torch.empty(world * len(x), WIDTH, device=DEVICE)
        dist.all_gather_into_tensor(every, features)
    else:
        every = torch.cat(differentiable.all_gather(features))
    own = torch.zeros(len(x), len(every), device=DEVICE)
    own[torch.arange(len(x)), rank * len(x) + torch.arange(len(x))] = 1
    (features @ every.T - own).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
