"""The checkpoint lacks the schedule of the learning rate: it begins again with its warm-up."""

import os

import torch
from common import DEVICE, FAULT, Net, loss_of, start
from torch.nn.parallel import DistributedDataParallel

FILE = "schedule.pt"
rank, world = start()
model = DistributedDataParallel(Net().to(DEVICE))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
begin, loaded = 0, None
if os.path.exists(FILE):
    loaded = torch.load(FILE, map_location="cpu")
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    begin = loaded["step"]
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=8)
if loaded and not FAULT:
    schedule.load_state_dict(loaded["schedule"])
    for group, rate in zip(optimizer.param_groups, schedule.get_last_lr(), strict=True):
        group["lr"] = rate
for step in range(begin, 5):
    loss_of(model, rank, step).backward()
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    if step == 1 and rank == 0:
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
        torch.save(states | {"schedule": schedule.state_dict()}, FILE)
