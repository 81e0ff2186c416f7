"""A message from any rank, whichever is first: which one depends on the run, and it is refused by name."""

# cause: name the source

import torch
import torch.distributed as dist

dist.init_process_group("nccl")
if dist.get_rank() == 0:
    for _ in range(dist.get_world_size() - 1):
        dist.recv(torch.zeros(1, device="cuda"))
else:
    dist.send(torch.zeros(1, device="cuda"), 0)
