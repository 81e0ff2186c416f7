"""Hooks that limit gradients are registered before FSDP2 replaces the parameters: they never run."""

import torch
from common import DEVICE, FAULT, STEPS, Net, loss_of, sharded, start

rank, world = start()
model = Net().to(DEVICE)
if FAULT:
    for each in model.parameters():
        each.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
sharded(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(STEPS):
    loss_of(model, rank, step).backward()
    if not FAULT:
        torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    optimizer.step()
    optimizer.zero_grad()
