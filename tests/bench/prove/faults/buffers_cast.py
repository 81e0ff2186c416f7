"""Positions in a buffer that mixed precision casts to bfloat16: neighbours become equal."""

import torch
from common import DEVICE, FAULT, STEPS, WIDTH, Block, start
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision


class Placed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Block(), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("places", torch.arange(600.0)[:, None])
        self.register_buffer("rates", 1.0 / torch.arange(1, WIDTH + 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(x + torch.sin(self.places * self.rates).to(x.dtype)))


rank, world = start()
low = torch.bfloat16
precision = MixedPrecision(
    param_dtype=low, reduce_dtype=torch.float32, buffer_dtype=low if FAULT else torch.float32
)
model = FullyShardedDataParallel(Placed().to(DEVICE), mixed_precision=precision)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(STEPS):
    x = torch.randn(2, 600, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank)).to(DEVICE)
    wanted = torch.sin(torch.arange(600.0)[:, None] / torch.arange(1, WIDTH + 1)).roll(1, 1).to(DEVICE)
    (model(0.1 * x).float() - wanted).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
