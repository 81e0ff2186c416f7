"""A sampler that shuffles is not given the number of the epoch: each epoch has the order of the first."""

import torch
import torch.nn.functional as F
from common import DEVICE, FAULT, WIDTH, Net, start
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

rank, world = start()
model = DistributedDataParallel(Net().to(DEVICE))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = TensorDataset(torch.randn(40 * world, WIDTH, generator=torch.Generator().manual_seed(0)))
sampler = DistributedSampler(data)
loader = DataLoader(data, 4, sampler=sampler)
for epoch in range(3):
    if not FAULT:
        sampler.set_epoch(epoch)
    for (x,) in loader:
        F.mse_loss(model(x.to(DEVICE)), x.roll(1, 1).to(DEVICE)).backward()
        optimizer.step()
        optimizer.zero_grad()
