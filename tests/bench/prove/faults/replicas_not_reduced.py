"""Hybrid sharding whose all-reduce between replicas is switched off and never on again."""

import torch
from common import DEVICE, FAULT, STEPS, Net, loss_of, sharded, start
from torch.distributed.device_mesh import init_device_mesh

rank, world = start()
mesh = init_device_mesh("cuda", (2, world // 2), mesh_dim_names=("replicate", "shard"))
model = sharded(Net().to(DEVICE), mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(STEPS):
    for micro in range(2):
        model.set_requires_all_reduce(micro == 1 and not FAULT)
        (loss_of(model, rank, 2 * step + micro) / 2).backward()
    optimizer.step()
    optimizer.zero_grad()
