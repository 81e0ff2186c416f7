"""Blocks are frozen by the beginning of their names, before which the compiler puts its own: none is."""

import torch
from common import DEVICE, FAULT, STEPS, Net, loss_of, sharded, start

rank, world = start()
model = torch.compile(sharded(Net().to(DEVICE)), backend="aot_eager")
for name, each in model.named_parameters():
    if (name if FAULT else name.removeprefix("_orig_mod.")).startswith("blocks.0."):
        each.requires_grad_(False)
optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
for step in range(STEPS):
    loss_of(model, rank, step).backward()
    optimizer.step()
    optimizer.zero_grad()
