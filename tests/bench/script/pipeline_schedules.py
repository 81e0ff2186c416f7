"""A pipeline by one of torch's schedules, on "cuda" or on real gloo ranks; prints each message that it posts.

Arguments: schedule, microbatches, data-parallel ranks a stage, width, `dynamic` if stages learn shapes.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

name, microbatches, replicas, width, *options = sys.argv[1:]
kind, device = getattr(pipelining, name), "cuda" if torch.cuda.is_available() else "cpu"
width = int(width)


def printing(call):
    def called(tensor, *args, **kwargs):
        other = kwargs.get("group_dst", kwargs.get("group_src"))
        print("message", call.__name__, other, tensor.numel(), flush=True)
        return call(tensor, *args, **kwargs)

    return called


for call in ("isend", "irecv"):
    replaced = printing(getattr(dist, call))
    setattr(dist, call, replaced)
    setattr(dist.distributed_c10d, call, replaced)

dist.init_process_group("nccl" if device == "cuda" else "gloo")
shape = dist.get_world_size() // int(replicas), int(replicas)
mesh = init_device_mesh(device, shape, mesh_dim_names=("pp", "dp"))
group, rank, ranks = mesh["pp"].get_group(), mesh["pp"].get_local_rank(), shape[0]
is_single = issubclass(kind, pipelining.schedules.PipelineScheduleSingle)
others = 2 * ranks - 1 - rank if "ZBV" in name or "DualPipe" in name else rank + ranks
parts = []
for _ in range(1 if is_single else 2):
    part = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(4)]).to(device)
    parts.append(fully_shard(part, mesh=mesh["dp"]) if int(replicas) > 1 else part)
rows = torch.empty(width, width, device="meta", requires_grad=True)
known = {} if "dynamic" in options else {"input_args": (rows,), "output_args": (rows,)}
stages = [
    pipelining.PipelineStage(part, index, ranks * len(parts), torch.device(device), group=group, **known)
    for part, index in zip(parts, [rank, others], strict=False)
]
schedule = kind(
    stages[0] if is_single else stages,
    n_microbatches=int(microbatches),
    loss_fn=lambda y, target: (y - target).pow(2).mean(),
)
optimizer = torch.optim.SGD([each for part in parts for each in part.parameters()], lr=0.1)
for step in range(8 if device == "cuda" else 2):
    print("step", step, flush=True)
    x = torch.randn(int(microbatches) * width, width, device=device)
    given = (x,) if any(stage.is_first for stage in stages) else ()
    last = {"target": x, "losses": []} if any(stage.is_last for stage in stages) else {}
    schedule.step(*given, **last)
    optimizer.step()
    optimizer.zero_grad()
