"""Gradients are clipped while they still have the factor of the scaler: nearly nothing is left of them."""

import torch
import torch.nn.functional as F
from common import DEVICE, FAULT, STEPS, Net, batch, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel

rank, world = start()
model = DistributedDataParallel(Net().to(DEVICE))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler(DEVICE, init_scale=256.0)
for step in range(STEPS):
    x, y = batch(rank, step)
    with torch.autocast("cuda", dtype=torch.float16):
        out = model(x)
    scaler.scale(F.mse_loss(out.float(), y)).backward()
    if not FAULT:
        scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
