"""DDP inside Join divides by the ranks that are left, and jagged rows are padded, with gradients through both."""

# prints: 7 (3, 5, 16)

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 16)).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with Join([model], divide_by_initial_world_size=False):
    for step in range(8):
        rows = [torch.randint(0, 32, (length,)) for length in (2, 5, 3)]
        ragged = torch.nested.nested_tensor(rows, layout=torch.jagged, device="cuda")
        padded = torch.nested.to_padded_tensor(model(ragged), 0.0)
        padded.sum(1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(step, tuple(padded.shape))
dist.destroy_process_group()
