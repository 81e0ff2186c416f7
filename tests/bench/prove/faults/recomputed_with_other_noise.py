"""A checkpoint that does not keep the state of random numbers: recomputation draws other noise."""

import torch
import torch.nn.functional as F
from common import DEVICE, FAULT, STEPS, Net, batch, sharded, start
from torch import nn
from torch.utils.checkpoint import checkpoint


class Noisy(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x * (1 + 0.3 * torch.randn_like(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False, preserve_rng_state=not FAULT)


rank, world = start()
net = Net()
for index, block in enumerate(net.blocks):
    net.blocks[index] = Noisy(block)
model = sharded(net.to(DEVICE))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(STEPS):
    torch.manual_seed(100 * step + rank)
    x, y = batch(rank, step)
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
