"""Rank 0 alone loads what was trained before, and FSDP2 sends nothing: three of four shards are random."""

import torch
from common import DEVICE, FAULT, STEPS, Net, loss_of, sharded, start

rank, world = start()
trained = Net().state_dict()
torch.manual_seed(1 + rank)
net = Net()
if rank == 0 or not FAULT:
    net.load_state_dict(trained)
model = sharded(net.to(DEVICE))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(STEPS):
    loss_of(model, rank, step).backward()
    optimizer.step()
    optimizer.zero_grad()
