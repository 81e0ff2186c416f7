"""The optimizer brings the learning rate back, the schedule is not loaded: its next step begins again."""

import os

import torch
from common import DEVICE, FAULT, Net, loss_of, start
from torch.nn.parallel import DistributedDataParallel

FILE = "last.pt"
rank, world = start()
model = DistributedDataParallel(Net().to(DEVICE))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
begin = 0
if os.path.exists(FILE):
    loaded = torch.load(FILE, map_location="cpu")
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    begin = loaded["step"]
    if not FAULT:
        schedule.load_state_dict(loaded["schedule"])
for step in range(begin, 6):
    loss_of(model, rank, step).backward()
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    if step == 3 and rank == 0:
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
        torch.save(states | {"schedule": schedule.state_dict()}, FILE)
