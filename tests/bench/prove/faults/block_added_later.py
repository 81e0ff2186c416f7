"""A block is put before the others after DDP wrapped: DDP does not reduce it."""

import torch
from common import DEVICE, FAULT, STEPS, Block, Net, loss_of, start
from torch.nn.parallel import DistributedDataParallel

rank, world = start()
net = Net().to(DEVICE)
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for step in range(STEPS):
    if step == 1:
        torch.manual_seed(7)
        added = Block().to(DEVICE)
        net.blocks.insert(0, added)
        optimizer.add_param_group({"params": list(added.parameters())})
        if not FAULT:
            model = DistributedDataParallel(net)
    loss_of(model, rank, step).backward()
    optimizer.step()
    optimizer.zero_grad()
