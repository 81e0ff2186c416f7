"""torch's FSDP2 and FSDP1 with CPU offload: parameters are written after an evaluation.

fsdpbench run --script docs/examples/races/write_offloaded.py --gpus 8 --sanitize
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())

model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(4)])
for layer in model:
    fully_shard(layer, offload_policy=CPUOffloadPolicy())
fully_shard(model, offload_policy=CPUOffloadPolicy())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

for _ in range(4):
    model(torch.randn(64, 1024, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
with torch.no_grad():
    model(torch.randn(64, 1024, device="cuda"))
    # Missing: torch.cuda.synchronize()
    for parameter in model.parameters():
        parameter.mul_(0.999)

dist.destroy_process_group()
