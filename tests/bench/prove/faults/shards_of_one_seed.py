"""Built on the meta device; each rank fills its shard with random numbers of one seed: shards are equal."""

import torch
from common import DEVICE, FAULT, STEPS, Net, loss_of, sharded, start

rank, world = start()
with torch.device("meta"):
    net = Net()
model = sharded(net)
model.to_empty(device=DEVICE)
torch.manual_seed(7 if FAULT else 7 + rank)
for each in model.parameters():
    local = each.to_local() if hasattr(each, "to_local") else each
    torch.nn.init.normal_(local, std=0.2)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(STEPS):
    loss_of(model, rank, step).backward()
    optimizer.step()
    optimizer.zero_grad()
