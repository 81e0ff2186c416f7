"""The loss is copied to the host without waiting, and read there immediately."""

import torch
from common import DEVICE, FAULT, STEPS, Net, loss_of, sharded, start

rank, world = start()
model = sharded(Net().to(DEVICE))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
host = torch.zeros((), pin_memory=True)
for step in range(STEPS):
    loss = loss_of(model, rank, step)
    loss.backward()
    host.copy_(loss.detach(), non_blocking=True)
    if not FAULT:
        torch.cuda.current_stream().synchronize()
    print(f"step {step}: {host.item():.3f}")
    optimizer.step()
    optimizer.zero_grad()
