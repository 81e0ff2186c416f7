"""Each rank updates some weights and sends them; half are taken from another rank than their owner."""

import torch
import torch.distributed as dist
from common import DEVICE, FAULT, STEPS, Net, loss_of, start
from torch.nn.parallel import DistributedDataParallel

rank, world = start()
model = DistributedDataParallel(Net().to(DEVICE))
weights = list(model.parameters())
optimizer = torch.optim.AdamW([each for index, each in enumerate(weights) if index % world == rank], lr=1e-3)
for step in range(STEPS):
    loss_of(model, rank, step).backward()
    optimizer.step()
    for index, each in enumerate(weights):
        dist.broadcast(each.data, index % (world // 2) if FAULT else index % world)
    model.zero_grad()
