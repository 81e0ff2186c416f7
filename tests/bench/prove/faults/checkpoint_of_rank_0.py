"""Each rank's sharded state goes into a file of rank 0 alone: the others' shards are lost."""

import os

import torch
import torch.distributed as dist
from common import DEVICE, FAULT, Net, loss_of, sharded, start
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)

FILE = "weights-of-faults.pt"
rank, world = start()
model = sharded(Net().to(DEVICE))
whole = StateDictOptions(full_state_dict=True, cpu_offload=False)
begin = 0
if os.path.exists(FILE):
    saved = torch.load(FILE, weights_only=False)
    begin = saved["step"]
    if FAULT:
        own = dict(model.named_parameters())
        with torch.no_grad():
            for name, shard in saved["model"].items():
                mine = own[name].to_local()
                mine[: len(shard)] = shard[: len(mine)]
    else:
        set_model_state_dict(model, saved["model"], options=whole)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for step in range(begin, 5):
    loss_of(model, rank, step).backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 1:
        if FAULT:
            weights = {name: p.to_local() for name, p in model.named_parameters()}
        else:
            weights = get_model_state_dict(model, options=whole)
        if rank == 0:
            torch.save({"model": weights, "step": step + 1}, FILE)
        dist.barrier()
