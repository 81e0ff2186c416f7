"""DDP's communication hook divides twice."""

import torch
import torch.distributed as dist
from common import DEVICE, FAULT, STEPS, Net, loss_of, start
from torch.nn.parallel import DistributedDataParallel


def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    flat = bucket.buffer().div_(dist.get_world_size())
    future = dist.all_reduce(flat, async_op=True).get_future()
    again = dist.get_world_size() if FAULT else 1
    return future.then(lambda done: done.value()[0] / again)


rank, world = start()
model = DistributedDataParallel(Net().to(DEVICE))
model.register_comm_hook(None, hook)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(STEPS):
    loss_of(model, rank, step).backward()
    optimizer.step()
    optimizer.zero_grad()
