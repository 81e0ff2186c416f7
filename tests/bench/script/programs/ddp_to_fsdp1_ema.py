"""A DDP program that was ported to FSDP1: auto-wrapped blocks, an EMA of the shards, warm-up and cosine."""

import copy
import functools
import os

import torch
import torch.distributed as dist
from tiny import GPT, Block, Tokens
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("nccl")
local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
model = FSDP(GPT(), auto_wrap_policy=policy, mixed_precision=precision, device_id=local_rank)
average = [copy.deepcopy(p.detach()) for p in model.parameters()]
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
schedule = SequentialLR(
    optimizer, [LinearLR(optimizer, 0.1, total_iters=3), CosineAnnealingLR(optimizer, 10)], milestones=[3]
)
data = Tokens()
loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data), drop_last=True)
for epoch in range(3):
    loader.sampler.set_epoch(epoch)
    for tokens, labels in loader:
        loss = model(tokens.cuda(non_blocking=True), labels.cuda(non_blocking=True))
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_lerp_(average, list(model.parameters()), 0.001)
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {loss.item():.3f}, lr {schedule.get_last_lr()[0]:.2e}")
dist.destroy_process_group()
