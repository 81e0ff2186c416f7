"""The loss is divided by the tokens of all ranks, and FSDP averages over ranks too."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import DEVICE, FAULT, STEPS, Net, batch, sharded, start

rank, world = start()
model = sharded(Net().to(DEVICE))
if not FAULT:
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(1.0)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for step in range(STEPS):
    x, y = batch(rank, step)
    count = torch.tensor(float(y.numel()), device=DEVICE)
    dist.all_reduce(count)
    (F.mse_loss(model(x), y, reduction="sum") / count).backward()
    optimizer.step()
    optimizer.zero_grad()
