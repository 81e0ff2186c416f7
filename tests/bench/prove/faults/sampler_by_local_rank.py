"""A sampler that counts the ranks of a node: each node reads the same samples."""

import os

import torch
import torch.nn.functional as F
from common import DEVICE, FAULT, STEPS, WIDTH, Net, sharded, start
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

rank, world = start()
model = sharded(Net().to(DEVICE))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = TensorDataset(torch.randn(6 * STEPS * world, WIDTH, generator=torch.Generator().manual_seed(0)))
ranks = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
loader = DataLoader(data, 6, sampler=DistributedSampler(data, *(ranks if FAULT else (world, rank))))
for _, (x,) in zip(range(STEPS), loader, strict=False):
    F.mse_loss(model(x.to(DEVICE)), x.roll(1, 1).to(DEVICE)).backward()
    optimizer.step()
    optimizer.zero_grad()
