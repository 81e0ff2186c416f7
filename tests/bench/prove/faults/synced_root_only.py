"""In accumulation FSDP2's sync is switched on for the root only: blocks keep sums of their own rank."""

import torch
from common import DEVICE, FAULT, STEPS, Net, loss_of, sharded, start

rank, world = start()
model = sharded(Net().to(DEVICE))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(STEPS):
    for micro in range(2):
        model.set_requires_gradient_sync(False)
        if micro == 1:
            model.set_requires_gradient_sync(True, recurse=not FAULT)
        (loss_of(model, rank, 2 * step + micro) / 2).backward()
    optimizer.step()
    optimizer.zero_grad()
