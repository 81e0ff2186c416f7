"""Adapters get no gradient: the reentrant checkpoint's input needs none, since all before it is frozen."""

import torch
import torch.nn.functional as F
from common import DEVICE, FAULT, STEPS, WIDTH, Net, batch, sharded, start
from torch import nn
from torch.utils.checkpoint import checkpoint


class Adapted(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x) + self.up(self.down(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=FAULT)


rank, world = start()
net = Net().requires_grad_(False)
for index, block in enumerate(net.blocks):
    net.blocks[index] = Adapted(block)
net.head.requires_grad_(True)
model = sharded(net.to(DEVICE))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
for step in range(STEPS):
    x, y = batch(rank, step)
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
