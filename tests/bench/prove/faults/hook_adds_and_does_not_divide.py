"""A hook adds the gradient of what FSDP2 ignores over ranks in backward, and nothing divides it."""

import torch
import torch.distributed as dist
from common import DEVICE, FAULT, STEPS, Net, loss_of, sharded, start

rank, world = start()
net = Net().to(DEVICE)
head = set(net.head.parameters())
model = sharded(net, ignored_params=head)


def add(parameter: torch.nn.Parameter) -> None:
    """Add a gradient over ranks."""
    dist.all_reduce(parameter.grad)
    if not FAULT:
        parameter.grad /= world


for p in head:
    p.register_post_accumulate_grad_hook(add)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, foreach=False)
for step in range(STEPS):
    loss_of(model, rank, step).backward()
    optimizer.step()
    optimizer.zero_grad()
