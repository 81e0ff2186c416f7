"""Weights of two dimensions are to decay, chosen after FSDP1 made stretches of one dimension of them."""

import torch
from common import DEVICE, FAULT, STEPS, Net, loss_of, start
from torch.distributed.fsdp import FullyShardedDataParallel

rank, world = start()
net = Net().to(DEVICE)
shapes = {name: each.ndim for name, each in net.named_parameters()}
model = FullyShardedDataParallel(net, use_orig_params=True)
groups = {True: [], False: []}
for name, each in model.named_parameters():
    ndim = each.ndim if FAULT else shapes[name.replace("_fsdp_wrapped_module.", "").removeprefix("module.")]
    groups[ndim > 1].append(each)
groups = [{"params": groups[True], "weight_decay": 0.1}, {"params": groups[False], "weight_decay": 0.0}]
optimizer = torch.optim.AdamW([each for each in groups if each["params"]], lr=1e-2)
for step in range(STEPS):
    loss_of(model, rank, step).backward()
    optimizer.step()
    optimizer.zero_grad()
