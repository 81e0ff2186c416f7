"""Tokens are counted over the ranks of a shard group, gradients are averaged over all replicas."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import DEVICE, FAULT, STEPS, Net, batch, sharded, start
from torch.distributed.device_mesh import init_device_mesh

rank, world = start()
mesh = init_device_mesh(DEVICE, (2, world // 2), mesh_dim_names=("replicas", "shards"))
model = sharded(Net().to(DEVICE), mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(STEPS):
    x, y = batch(rank, step, rows=4 + 3 * rank)
    count = torch.tensor(float(y.numel()), device=DEVICE)
    group = mesh["shards"].get_group() if FAULT else None
    dist.all_reduce(count, group=group)
    share = count / (world // 2 if FAULT else world)
    (F.mse_loss(model(x), y, reduction="sum") / share).backward()
    optimizer.step()
    optimizer.zero_grad()
