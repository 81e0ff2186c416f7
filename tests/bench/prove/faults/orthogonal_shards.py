"""An optimizer makes the update of each weight orthogonal: here of each rank's rows alone."""

import torch
from common import DEVICE, FAULT, STEPS, Net, loss_of, sharded, start
from torch.distributed.tensor import DTensor, distribute_tensor


class Orthogonal(torch.optim.SGD):
    """Descent along the nearest orthogonal matrix."""

    @torch.no_grad()
    def step(self) -> None:
        for each in self.param_groups[0]["params"]:
            if each.ndim > 1 and isinstance(each, DTensor):
                whole = each.grad.to_local() if FAULT else each.grad.full_tensor()
                u, _, v = torch.linalg.svd(whole, full_matrices=False)
                if FAULT:
                    each.grad.to_local().copy_(u @ v)
                else:
                    each.grad.copy_(distribute_tensor(u @ v, each.device_mesh, each.placements))
            elif each.ndim > 1:
                u, _, v = torch.linalg.svd(each.grad, full_matrices=False)
                each.grad.copy_(u @ v)
        super().step()


rank, world = start()
model = sharded(Net().to(DEVICE))
optimizer = Orthogonal(model.parameters(), lr=1e-2)
for step in range(STEPS):
    loss_of(model, rank, step).backward()
    optimizer.step()
    optimizer.zero_grad()
