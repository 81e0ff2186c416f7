"""A list of names that DDP is to ignore is left from adapters, and matches the head too."""

import torch
from common import DEVICE, FAULT, STEPS, Net, loss_of, start
from torch.nn.parallel import DistributedDataParallel

rank, world = start()
net = Net().to(DEVICE)
if FAULT:
    names = [name for name, _ in net.named_parameters() if name.startswith("head")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, names)
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(STEPS):
    loss_of(model, rank, step).backward()
    optimizer.step()
    optimizer.zero_grad()
