"""torch's FSDP2: an all-reduce hook on a stream of its own, and gradients that are accumulated.

fsdpbench run --script docs/examples/races/hook_on_a_stream.py --gpus 8 --sanitize
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())

model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(4)]).cuda()
stream = torch.cuda.Stream()
for layer in model:
    fully_shard(layer)
fully_shard(model)
for layer in model:
    layer.set_all_reduce_hook(lambda gradient: gradient.mul_(0.5), stream=stream)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

for _ in range(4):
    for _ in range(2):  # the second backward adds to the gradients of the first
        model(torch.randn(64, 1024, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

dist.destroy_process_group()
