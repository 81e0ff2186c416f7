"""Objects among ranks, barriers of every kind, a group on the host beside NCCL, and elastic variables."""

import datetime
import os
import random
import socket

import torch
import torch.distributed as dist
from tiny import GPT, LENGTH, VOCAB

if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0:
    print("restarted")
assert dist.is_torchelastic_launched()
dist.init_process_group("nccl", timeout=datetime.timedelta(minutes=30), device_id=torch.device("cuda:0"))
rank, world = dist.get_rank(), dist.get_world_size()
host = dist.new_group(backend="gloo")
hosts = [None] * world
dist.all_gather_object(hosts, socket.gethostname(), group=host)
seen = [None] * world if rank == 0 else None
dist.gather_object({"rank": rank, "pid": os.getpid()}, seen, dst=0)
names = ["run", random.random()] if rank == 0 else [None, None]
dist.broadcast_object_list(names, src=0, device=torch.device("cuda"))
mine = [None]
dist.scatter_object_list(mine, [{"part": i} for i in range(world)] if rank == 0 else None, src=0)
assert names[0] == "run" and "part" in mine[0] and len(set(hosts)) >= 1
dist.barrier(device_ids=[int(os.environ["LOCAL_RANK"])])
dist.monitored_barrier(group=host, timeout=datetime.timedelta(seconds=60))
local = dist.new_subgroups(group_size=2)[0]

model = torch.nn.parallel.DistributedDataParallel(GPT().cuda(), device_ids=[0])
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(8):
    tokens = torch.randint(0, VOCAB, (2, LENGTH), device="cuda")
    loss = model(tokens, tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    shown = loss.detach().clone()
    dist.all_reduce(shown, op=dist.ReduceOp.AVG, group=local)
    dist.reduce(shown, dst=0)
    parts = [torch.empty_like(shown) for _ in range(world)]
    dist.all_gather(parts, shown)
    if rank == 0:
        print(f"{torch.stack(parts).mean().item():.4f}")
dist.barrier(group=host, async_op=True).wait()
dist.destroy_process_group()
