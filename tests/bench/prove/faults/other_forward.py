"""Training goes through another method than forward, for which FSDP2 has no hook."""

import torch
import torch.nn.functional as F
from common import DEVICE, FAULT, STEPS, Net, batch, sharded, start
from torch.distributed.fsdp import register_fsdp_forward_method


class Encoder(Net):
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return Net.forward(self, x)


rank, world = start()
model = sharded(Encoder().to(DEVICE))
if not FAULT:
    register_fsdp_forward_method(model, "encode")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(STEPS):
    x, y = batch(rank, step)
    F.mse_loss(model.encode(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
