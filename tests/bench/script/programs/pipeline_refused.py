"""Pipeline stages by torch's schedules: refused where the first stage sends, with the way out."""

# cause: leave the pipeline out

import torch
import torch.distributed as dist
from tiny import LENGTH, WIDTH, Block
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
part = nn.Sequential(Block(), Block()).cuda()
x = torch.randn(8, LENGTH, WIDTH, device="cuda")
stage = PipelineStage(part, rank, world, torch.device("cuda"), input_args=(x[:1],), output_args=(x[:1],))
schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=lambda y, target: (y - target).pow(2).mean())
optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
for _ in range(7):
    if rank == 0:
        schedule.step(x)
    else:
        schedule.step(target=x, losses=[])
    optimizer.step()
    optimizer.zero_grad()
