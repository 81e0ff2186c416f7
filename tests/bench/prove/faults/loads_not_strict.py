"""Names of a checkpoint have DDP's prefix, and are loaded with `strict=False`: nothing is."""

import os

import torch
from common import DEVICE, FAULT, Net, loss_of, start
from torch.nn.parallel import DistributedDataParallel

FILE = "not-strict.pt"
rank, world = start()
inner = Net().to(DEVICE)
model = DistributedDataParallel(inner)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
begin = 0
if os.path.exists(FILE):
    loaded = torch.load(FILE, map_location="cpu")
    (inner if FAULT else model).load_state_dict(loaded["model"], strict=False)
    optimizer.load_state_dict(loaded["optimizer"])
    begin = loaded["step"]
for step in range(begin, 5):
    loss_of(model, rank, step).backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 1 and rank == 0:
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
        torch.save(states, FILE)
