"""On rank 0 the optimizer lacks the first layer, which DDP trains everywhere else."""

import torch
from common import DEVICE, FAULT, STEPS, Net, loss_of, start
from torch.nn.parallel import DistributedDataParallel

rank, world = start()
model = DistributedDataParallel(Net().to(DEVICE))
chosen = [each for name, each in model.named_parameters() if not (FAULT and rank == 0 and ".first." in name)]
optimizer = torch.optim.AdamW(chosen, lr=1e-3)
for step in range(STEPS):
    loss_of(model, rank, step).backward()
    optimizer.step()
    model.zero_grad()
