"""Data are random numbers of the seed with which all ranks begin."""

import torch
import torch.nn.functional as F
from common import DEVICE, FAULT, STEPS, WIDTH, Net, start
from torch.nn.parallel import DistributedDataParallel

rank, world = start()
torch.manual_seed(1234)
model = DistributedDataParallel(Net().to(DEVICE))
if not FAULT:
    torch.manual_seed(1234 + rank)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(STEPS):
    x = torch.randn(6, WIDTH, device=DEVICE)
    F.mse_loss(model(x), x.roll(1, 1)).backward()
    optimizer.step()
    optimizer.zero_grad()
