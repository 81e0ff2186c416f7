"""Which channels a block drops is counted in what is checkpointed: recomputation drops the others."""

import torch
import torch.nn.functional as F
from common import DEVICE, FAULT, STEPS, Net, batch, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint


class Dropping(nn.Module):
    """Drops the half of a block's channels, chosen anew in each call."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self.calls = block, 0

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += FAULT
        return self.block(x * (torch.arange(x.shape[-1], device=x.device) % 2 == self.calls % 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += not FAULT
        return checkpoint(self.inner, x, use_reentrant=False)


rank, world = start()
net = Net()
for index, block in enumerate(net.blocks):
    net.blocks[index] = Dropping(block)
model = DistributedDataParallel(net.to(DEVICE))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(STEPS):
    x, y = batch(rank, step)
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
