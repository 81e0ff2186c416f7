"""A plain GradScaler with FSDP1: each rank looks for infinities in its own shard only, and skips alone."""

import torch
import torch.nn.functional as F
from common import DEVICE, FAULT, STEPS, Net, batch, start
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler


class Scaled(Net):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(x), (self.last * factor).sum()


rank, world = start()
model = FullyShardedDataParallel(Scaled().to(DEVICE), use_orig_params=True)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
kind = torch.amp.GradScaler if FAULT else ShardedGradScaler
scaler = kind(device=DEVICE, init_scale=64.0)
for step in range(STEPS):
    x, y = batch(rank, step)
    # In step 1 the gradient of the last parameter overflows; one rank holds it.
    with torch.autocast("cuda", dtype=torch.float16):
        out, more = model(x, 1e38 if step == 1 else 1e-3)
    scaler.scale(F.mse_loss(out.float(), y) + more).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
