"""Adapters are merged into frozen weights after each step; each rank takes the first rows for its own."""

import torch
from common import DEVICE, FAULT, STEPS, WIDTH, Net, loss_of, sharded, start
from torch import nn


class Adapted(nn.Module):
    def __init__(self, inside: nn.Linear) -> None:
        super().__init__()
        self.inside = inside.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(4, WIDTH) / 8)
        self.up = nn.Parameter(torch.randn(WIDTH, 4) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inside(x) + x @ self.down.T @ self.up.T


rank, world = start()
net = Net()
net.head = Adapted(net.head)
model = sharded(net.to(DEVICE))
optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
for step in range(STEPS):
    loss_of(model, rank, step).backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        product = 0.1 * model.head.up.full_tensor() @ model.head.down.full_tensor()
        local = model.head.inside.weight.to_local()
        is_sharded = len(local) < WIDTH
        first = rank * len(local) if is_sharded and not FAULT else 0
        local += product[first : first + len(local)]
