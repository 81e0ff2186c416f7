"""FSDP1, hybrid: `get_state_dict` to a distributed checkpoint, in the background, and back."""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tiny import GPT, LENGTH, VOCAB, Block
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

dist.init_process_group("cpu:gloo,cuda:nccl")
mesh = init_device_mesh("cuda", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
model = FSDP(
    GPT().cuda(),
    device_mesh=mesh,
    sharding_strategy=ShardingStrategy.HYBRID_SHARD,
    auto_wrap_policy=ModuleWrapPolicy({Block}),
    use_orig_params=True,
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=True)
folder = sys.argv[1] if len(sys.argv) > 1 else "sharded"
saving = None
for step in range(8):
    tokens = torch.randint(0, VOCAB, (2, LENGTH), device="cuda")
    loss = model(tokens, tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 3:
        weights, states = get_state_dict(model, optimizer)
        saving = dcp.async_save({"model": weights, "optimizer": states}, checkpoint_id=folder)
    if step == 5:
        saving.result()
        weights, states = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
dist.destroy_process_group()
