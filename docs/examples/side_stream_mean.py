"""A training script with a data race: a side stream reads the output before it is written.

fsdpbench run --script docs/examples/side_stream_mean.py --gpus 8 --sanitize
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
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

main, side = torch.cuda.current_stream(), torch.cuda.Stream()
running_mean = torch.zeros(1024, device="cuda")
side.wait_stream(main)

for _ in range(8):
    output = model(torch.randn(64, 1024, device="cuda"))
    # Missing: side.wait_stream(main)
    with torch.cuda.stream(side):
        running_mean.lerp_(output.detach().mean(0), 0.01)
    # Missing: output.record_stream(side)
    output.square().mean().backward()
    del output
    optimizer.step()
    optimizer.zero_grad()

dist.destroy_process_group()
