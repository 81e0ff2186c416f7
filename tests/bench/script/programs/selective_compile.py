"""Blocks compiled one by one under fully_shard, a compiled optimizer step, and marks of dynamic sizes."""

# cause with --sanitize: a compiled part is not simulated

import torch
import torch.distributed as dist
from tiny import GPT, LENGTH, VOCAB
from torch.distributed.fsdp import fully_shard

dist.init_process_group("nccl")
torch._dynamo.config.cache_size_limit = 64
model = GPT(2).cuda()
for block in model.blocks:
    block.compile()
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3))
for step in range(8):
    tokens = torch.randint(0, VOCAB, (2, LENGTH - (step % 2) * 8), device="cuda")
    torch.compiler.cudagraph_mark_step_begin()
    model(tokens, tokens).backward()
    optimizer.step()
    optimizer.zero_grad()
