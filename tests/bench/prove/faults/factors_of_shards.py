"""Second moments by rows and columns, as Adafactor keeps them: here those of a rank's rows alone."""

import torch
from common import DEVICE, FAULT, STEPS, Net, loss_of, sharded, start
from torch.distributed.tensor import distribute_tensor


class Factored(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self) -> None:
        for p in self.param_groups[0]["params"]:
            g = p.grad.to_local() if FAULT else p.grad.full_tensor()
            moments = g.square() + 1e-8
            if g.ndim == 2:
                rows, columns = moments.mean(1), moments.mean(0)
                moments = rows[:, None] * columns / rows.mean()
            update = g / moments.sqrt()
            if not FAULT:
                update = distribute_tensor(update, p.device_mesh, p.placements).to_local()
            p.to_local().sub_(update, alpha=self.defaults["lr"])


rank, world = start()
model = sharded(Net().to(DEVICE))
optimizer = Factored(model.parameters(), {"lr": 1e-3})
for step in range(STEPS):
    loss_of(model, rank, step).backward()
    optimizer.step()
    optimizer.zero_grad()
