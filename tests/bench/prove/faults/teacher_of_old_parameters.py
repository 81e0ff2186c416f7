"""A teacher averages the parameters that were there before FSDP2 replaced them: it never moves."""

import copy

import torch
import torch.nn.functional as F
from common import DEVICE, FAULT, STEPS, Net, batch, sharded, start

rank, world = start()
model = Net().to(DEVICE)
teacher = copy.deepcopy(model).requires_grad_(False)
own = list(model.parameters())
sharded(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(STEPS):
    x, y = batch(rank, step)
    wanted = teacher(x)
    given = model(x)
    (F.mse_loss(given, y) + F.mse_loss(given, wanted)).backward()
    optimizer.step()
    optimizer.zero_grad()
    now = own if FAULT else [each.full_tensor() for each in model.parameters()]
    with torch.no_grad():
        for mean, each in zip(teacher.parameters(), now, strict=True):
            mean.lerp_(each, 0.5)
