"""Tied weights in two units: each gets a shard of its own, and they part."""

import torch
import torch.nn.functional as F
from common import DEVICE, FAULT, STEPS, Block, start
from torch import nn
from torch.distributed.fsdp import fully_shard


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.block = nn.Embedding(40, 24), Block()
        self.head = nn.Linear(24, 40, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.tokens(ids)))


rank, world = start()
model = Tied().to(DEVICE)
fully_shard(model.block)
if FAULT:
    fully_shard(model.tokens)
    fully_shard(model.head)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(STEPS):
    ids = torch.randint(0, 40, (4, 9), generator=torch.Generator().manual_seed(100 * step + rank)).to(DEVICE)
    F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
