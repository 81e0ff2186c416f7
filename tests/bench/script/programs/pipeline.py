"""Two pipeline stages of FSDP2 on a 2-D mesh by torch's schedule, whose stages learn shapes from each other."""

# prints: stage 0 of 2
# cause with --sanitize: leave these out

import torch
import torch.distributed as dist
from tiny import LENGTH, WIDTH, Block
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

dist.init_process_group("nccl")
mesh = init_device_mesh("cuda", (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "dp"))
place, group = mesh["pp"].get_local_rank(), mesh["pp"].get_group()
part = nn.Sequential(Block(), Block()).cuda()
for block in part:
    fully_shard(block, mesh=mesh["dp"])
fully_shard(part, mesh=mesh["dp"])
stage = PipelineStage(part, place, 2, torch.device("cuda"), group=group)
schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=lambda y, target: (y - target).pow(2).mean())
optimizer = torch.optim.AdamW(part.parameters(), lr=0.1)
for _ in range(7):
    x = torch.randn(8, LENGTH, WIDTH, device="cuda")
    if place == 0:
        schedule.step(x)
    else:
        losses = []
        schedule.step(target=x, losses=losses)
    names = [None, None]
    dist.all_gather_object(names, f"stage {place}", group=group)
    assert names == ["stage 0", "stage 1"], names
    tokens = torch.tensor(10 + place, device="cuda")
    dist.all_reduce(tokens, group=group)
    assert tokens.item() == 21
    torch.nn.utils.clip_grad_norm_(part.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
print(f"stage {place} of 2")
