"""Every second step skips a layer, and DDP does not look for unused parameters."""

import torch
from common import DEVICE, FAULT, STEPS, Net, loss_of, start
from torch.nn.parallel import DistributedDataParallel

rank, world = start()
net = Net().to(DEVICE)
model = DistributedDataParallel(net, find_unused_parameters=not FAULT)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
block = net.blocks[1]
for step in range(STEPS):
    net.blocks[1] = block if step % 2 == 0 else torch.nn.Identity()
    loss_of(model, rank, step).backward()
    optimizer.step()
    optimizer.zero_grad()
