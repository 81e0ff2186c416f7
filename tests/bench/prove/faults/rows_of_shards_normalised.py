"""After each step columns are normalised in place, by the norm of the rows that a rank holds."""

import torch
from common import DEVICE, FAULT, STEPS, Net, loss_of, sharded, start

rank, world = start()
model = sharded(Net().to(DEVICE))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(STEPS):
    loss_of(model, rank, step).backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        weight = model.head.weight
        norm = (weight.to_local() if FAULT else weight.full_tensor()).norm(dim=0)
        weight.to_local().div_(norm)
