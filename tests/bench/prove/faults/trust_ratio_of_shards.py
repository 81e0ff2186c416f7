"""An optimizer scales each update by the norms of weight and gradient: here of a rank's shard alone."""

import torch
from common import DEVICE, FAULT, STEPS, Net, loss_of, sharded, start
from torch.distributed.tensor import DTensor


def norm(tensor: torch.Tensor) -> float:
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local() if FAULT else tensor.full_tensor()
    return float(tensor.norm()) + 1e-6


class Trusting(torch.optim.SGD):
    """Descent by a share of each weight's norm."""

    @torch.no_grad()
    def step(self) -> None:
        for each in self.param_groups[0]["params"]:
            each.add_(each.grad, alpha=-0.01 * norm(each) / norm(each.grad))


rank, world = start()
model = sharded(Net().to(DEVICE))
optimizer = Trusting(model.parameters(), lr=1.0)
for step in range(STEPS):
    loss_of(model, rank, step).backward()
    optimizer.step()
    optimizer.zero_grad()
