"""Random features in a buffer, drawn with a seed of each rank: FSDP does not send buffers."""

import torch
import torch.nn.functional as F
from common import DEVICE, FAULT, STEPS, WIDTH, Net, batch, sharded, start
from torch import nn


class Random(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Net()
        self.blocks = self.inner.blocks
        generator = torch.Generator().manual_seed(rank if FAULT else 0)
        self.register_buffer("features", torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(torch.cos(x @ self.features))


rank, world = start()
model = sharded(Random().to(DEVICE))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(STEPS):
    x, y = batch(rank, step)
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
