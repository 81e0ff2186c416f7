"""HSDP over a named mesh, checkpointing of every second block, accumulation without all-reduce, norms by part."""

import torch
import torch.distributed as dist
from tiny import GPT, LENGTH, VOCAB
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

dist.init_process_group("nccl")
mesh = init_device_mesh("cuda", (dist.get_world_size() // 4, 4), mesh_dim_names=("replicate", "shard"))
print(mesh["shard"].get_local_rank(), mesh["replicate"].size(), mesh.get_coordinate())
model = GPT(4).cuda()
chosen = set(list(model.blocks)[::2])
apply_activation_checkpointing(
    model,
    checkpoint_wrapper_fn=lambda m: checkpoint_wrapper(m, checkpoint_impl=CheckpointImpl.NO_REENTRANT),
    check_fn=lambda m: m in chosen,
)
policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=True)
for block in model.blocks:
    fully_shard(block, mesh=mesh, mp_policy=policy)
fully_shard(model, mesh=mesh, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3, device="cuda"), fused=True)
for _ in range(8):
    for micro in range(3):
        last = micro == 2
        model.set_requires_all_reduce(last)
        tokens = torch.randint(0, VOCAB, (2, LENGTH), device="cuda")
        loss = (
            checkpoint(lambda t: model(t, t), tokens, use_reentrant=False) if last else model(tokens, tokens)
        )
        (loss / 3).backward()
    norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
    total = torch.linalg.vector_norm(torch.stack(norms))
    optimizer.step()
    optimizer.zero_grad()
print(total.full_tensor().item() >= 0)
