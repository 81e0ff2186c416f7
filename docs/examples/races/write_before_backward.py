"""torch's FSDP2: parameters are written between forward and backward.

fsdpbench run --script docs/examples/races/write_before_backward.py --gpus 8 --sanitize
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())

model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(4)]).cuda()
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

for _ in range(4):
    loss = model(torch.randn(64, 1024, device="cuda")).square().mean()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-1, 1)
    # Missing: streams of gathers that wait for the line above; torch offers none before backward.
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

dist.destroy_process_group()
