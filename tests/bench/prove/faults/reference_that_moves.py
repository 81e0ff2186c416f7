"""The policy that training is held to is no copy: it moves with what is trained."""

import copy

import torch
import torch.nn.functional as F
from common import DEVICE, FAULT, STEPS, Net, batch, start
from torch.nn.parallel import DistributedDataParallel

rank, world = start()
net = Net().to(DEVICE)
reference = net if FAULT else copy.deepcopy(net).requires_grad_(False)
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(STEPS):
    x, y = batch(rank, step)
    with torch.no_grad():
        held = reference(x)
    out = model(x)
    (F.mse_loss(out, y) + F.mse_loss(out, held)).backward()
    optimizer.step()
    optimizer.zero_grad()
