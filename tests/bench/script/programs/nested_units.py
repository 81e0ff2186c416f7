"""Nested FSDP2 units: MLPs inside blocks, explicit prefetching, kept gathers, and a gradient divide factor."""

import torch
import torch.distributed as dist
from tiny import GPT, LENGTH, VOCAB
from torch.distributed.fsdp import FSDPModule, OffloadPolicy, fully_shard

dist.init_process_group("nccl")
model = GPT(4).cuda()
for block in model.blocks:
    fully_shard(block.mlp, reshard_after_forward=False)
    fully_shard(block, reshard_after_forward=4, offload_policy=OffloadPolicy())
fully_shard(model, reshard_after_forward=False)
assert isinstance(model, FSDPModule)
for index, block in enumerate(model.blocks):
    block.set_modules_to_forward_prefetch(list(model.blocks[index + 1 : index + 3]))
    block.set_modules_to_backward_prefetch(list(model.blocks[max(0, index - 2) : index])[::-1])
model.set_gradient_divide_factor(4.0)
model.embed_only = lambda tokens: model.embed(tokens)
optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
for step in range(8):
    tokens = torch.randint(0, VOCAB, (2, LENGTH), device="cuda")
    model.set_is_last_backward(True)
    handle = model.unshard(async_op=True)
    handle.wait()
    model(tokens, tokens).backward()
    total = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
    if step == 3:
        print(total.full_tensor().item(), model.embed.weight.to_local().shape, model.embed.weight.shape)
    optimizer.step()
    optimizer.zero_grad()
    model.reshard()
