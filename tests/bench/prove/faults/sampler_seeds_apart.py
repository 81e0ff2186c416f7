"""Samplers shuffle by a seed of their rank: some samples are read twice in an epoch, others never."""

import torch
import torch.nn.functional as F
from common import DEVICE, FAULT, STEPS, WIDTH, Net, sharded, start
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

rank, world = start()
model = sharded(Net().to(DEVICE))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = TensorDataset(torch.randn(6 * STEPS * world, WIDTH, generator=torch.Generator().manual_seed(0)))
loader = DataLoader(data, 6, sampler=DistributedSampler(data, seed=rank if FAULT else 7))
for _, (x,) in zip(range(STEPS), loader, strict=False):
    F.mse_loss(model(x.to(DEVICE)), x.roll(1, 1).to(DEVICE)).backward()
    optimizer.step()
    optimizer.zero_grad()
