"""Built on the meta device, and initialised with a seed of each rank: replicas begin differently."""

import torch
from common import DEVICE, FAULT, STEPS, Net, loss_of, sharded, start
from torch.distributed.device_mesh import init_device_mesh

rank, world = start()
mesh = init_device_mesh("cuda", (2, world // 2), mesh_dim_names=("replicate", "shard"))
with torch.device("meta"):
    model = Net()
model = sharded(model, mesh=mesh)
model.to_empty(device=DEVICE)
torch.manual_seed(rank if FAULT else rank % (world // 2))
with torch.no_grad():
    for parameter in model.parameters():
        parameter.to_local().normal_(std=0.05)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(STEPS):
    loss_of(model, rank, step).backward()
    optimizer.step()
    optimizer.zero_grad()
