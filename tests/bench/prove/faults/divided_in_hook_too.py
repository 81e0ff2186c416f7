"""A hook of each parameter divides by the ranks what DDP averages afterwards."""

import torch
from common import DEVICE, FAULT, STEPS, Net, loss_of, start
from torch.nn.parallel import DistributedDataParallel

rank, world = start()
model = DistributedDataParallel(Net().to(DEVICE))
if FAULT:
    for each in model.parameters():
        each.register_post_accumulate_grad_hook(lambda weight: weight.grad.div_(world) and None)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(STEPS):
    loss_of(model, rank, step).backward()
    optimizer.step()
    optimizer.zero_grad()
