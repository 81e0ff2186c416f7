"""A loss with parameters of its own stays outside of FSDP2: each rank trains its own."""

import torch
import torch.nn.functional as F
from common import DEVICE, FAULT, STEPS, WIDTH, Net, batch, sharded, start
from torch import nn
from torch.distributed.fsdp import fully_shard


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(out * self.weight, y)


rank, world = start()
model, loss = sharded(Net().to(DEVICE)), Weighted().to(DEVICE)
if not FAULT:
    fully_shard(loss)
optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=1e-2)
for step in range(STEPS):
    x, y = batch(rank, step)
    loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
