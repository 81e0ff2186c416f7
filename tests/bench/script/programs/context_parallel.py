"""Context parallelism with FSDP2 over a flattened mesh: sequences are split, rings of attention."""

import torch
import torch.distributed as dist
from tiny import GPT, LENGTH, VOCAB
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel

dist.init_process_group("nccl")
mesh = init_device_mesh("cuda", (4, 2), mesh_dim_names=("dp", "cp"))
both = mesh["dp", "cp"]._flatten("dp_cp")
model = GPT(2).cuda()
for block in model.blocks:
    fully_shard(block, mesh=both)
fully_shard(model, mesh=both)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(8):
    tokens = torch.randint(0, VOCAB, (2, LENGTH), device="cuda")
    labels = tokens.roll(-1, 1)
    with context_parallel(mesh["cp"], buffers=[tokens, labels], buffer_seq_dims=[1, 1]):
        with (
            sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]),
            torch.autocast("cuda", torch.bfloat16),
        ):
            loss = model(tokens, labels)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
