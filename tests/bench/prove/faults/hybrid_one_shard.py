"""FSDP1's hybrid sharding on an (n, 1) mesh: no rank ever exchanges a gradient."""

import torch
from common import DEVICE, FAULT, STEPS, Net, loss_of, start
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

rank, world = start()
if FAULT:
    mesh = init_device_mesh("cuda", (world, 1), mesh_dim_names=("replicate", "shard"))
    model = FullyShardedDataParallel(
        Net().to(DEVICE), device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD
    )
else:
    model = FullyShardedDataParallel(Net().to(DEVICE), sharding_strategy=ShardingStrategy.NO_SHARD)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(STEPS):
    loss_of(model, rank, step).backward()
    optimizer.step()
    optimizer.zero_grad()
