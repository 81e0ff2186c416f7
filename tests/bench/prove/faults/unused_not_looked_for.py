"""Every second step leaves out a block, and DDP does not look for unused parameters."""

import torch
from common import DEVICE, FAULT, STEPS, Net, loss_of, start
from torch.nn.parallel import DistributedDataParallel


class Dropping(Net):
    """A net whose second block may be left out; mended, what it returns counts nothing."""

    drops = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.first(x))
        if not self.drops or not FAULT:
            x = torch.lerp(self.blocks[1](x), x, float(self.drops))
        return self.head(x)


rank, world = start()
net = Dropping().to(DEVICE)
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(STEPS):
    net.drops = step % 2 == 1
    loss_of(model, rank, step).backward()
    optimizer.step()
    optimizer.zero_grad()
