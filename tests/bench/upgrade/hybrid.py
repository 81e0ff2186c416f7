"""Hybrid sharding by fully_shard, reduced in bf16: what is all-reduced is a buffer beside the fp32 gradient.

torch holds it for every unit until the end of backward. `--release` drops it at once, as torch did before
2.6, where the next unit could take its memory too early.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int, default=8)
parser.add_argument("--width", type=int, default=2048)
parser.add_argument("--tokens", type=int, default=64)
parser.add_argument("--shard", type=int, default=8)
parser.add_argument("--release", action="store_true")
arguments = parser.parse_args()

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
if arguments.release:
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    FSDPParamGroup._all_reduce_state = property(lambda group: None, lambda group, state: None)
mesh = init_device_mesh(
    "cuda", (dist.get_world_size() // arguments.shard, arguments.shard), mesh_dim_names=("replicate", "shard")
)
width = arguments.width
with torch.device("meta"):
    blocks = [
        nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        for _ in range(arguments.layers)
    ]
    model = nn.Sequential(*blocks)
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
for block in model:
    fully_shard(block, mesh=mesh, mp_policy=policy)
fully_shard(model, mesh=mesh, mp_policy=policy)
model.to_empty(device="cuda")
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for _ in range(20):
    model(torch.empty(arguments.tokens, width, device="cuda")).float().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
