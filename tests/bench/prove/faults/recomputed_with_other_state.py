"""What recomputation in backward sees is not what the forward saw: a centre that the forward moves."""

import torch
import torch.nn.functional as F
from common import DEVICE, FAULT, STEPS, WIDTH, Net, batch, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint


class Centred(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.register_buffer("centre", torch.zeros(WIDTH))

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        if FAULT:
            self.centre.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
        return self.block(x - self.centre.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not FAULT:
            self.centre.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
        return checkpoint(self.inner, x, use_reentrant=False)


rank, world = start()
net = Net()
for index, block in enumerate(net.blocks):
    net.blocks[index] = Centred(block)
model = DistributedDataParallel(net.to(DEVICE))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(STEPS):
    x, y = batch(rank, step)
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
