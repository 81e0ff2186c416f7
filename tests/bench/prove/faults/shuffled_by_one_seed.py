"""A loader shuffles by a seed that all ranks have: each reads the same samples."""

import torch
import torch.nn.functional as F
from common import DEVICE, FAULT, STEPS, WIDTH, Net, sharded, start
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

rank, world = start()
model = sharded(Net().to(DEVICE))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = TensorDataset(torch.randn(6 * STEPS * world, WIDTH, generator=torch.Generator().manual_seed(0)))
loader = DataLoader(data, 6, shuffle=True) if FAULT else DataLoader(data, 6, sampler=DistributedSampler(data))
for _, (x,) in zip(range(STEPS), loader, strict=False):
    F.mse_loss(model(x.to(DEVICE)), x.roll(1, 1).to(DEVICE)).backward()
    optimizer.step()
    optimizer.zero_grad()
