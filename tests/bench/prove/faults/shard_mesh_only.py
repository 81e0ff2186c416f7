"""Of a mesh of replicas and shards, FSDP2 gets the shards' dimension: replicas never exchange gradients."""

import torch
from common import DEVICE, FAULT, STEPS, Net, loss_of, sharded, start
from torch.distributed.device_mesh import init_device_mesh

rank, world = start()
mesh = init_device_mesh(DEVICE, (2, world // 2), mesh_dim_names=("replicate", "shard"))
model = sharded(Net().to(DEVICE), mesh=mesh["shard"] if FAULT else mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(STEPS):
    loss_of(model, rank, step).backward()
    optimizer.step()
    optimizer.zero_grad()
