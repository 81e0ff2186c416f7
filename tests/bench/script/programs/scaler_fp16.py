"""fp16 with a gradient scaler, unscaled clipping and skipped steps counted, under DDP and then FSDP1."""

import torch
import torch.distributed as dist
from tiny import GPT, LENGTH, VOCAB, Block
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl")
for kind in ("ddp", "fsdp"):
    if kind == "ddp":
        model = DistributedDataParallel(GPT().cuda(), device_ids=[0], gradient_as_bucket_view=True)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**12)
    else:
        model = FSDP(GPT(), auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=0)
        scaler = ShardedGradScaler()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    skipped = 0
    for _ in range(4):
        tokens = torch.randint(0, VOCAB, (2, LENGTH)).cuda()
        with torch.amp.autocast("cuda", dtype=torch.float16):
            loss = model(tokens, tokens)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if kind == "ddp":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        else:
            model.clip_grad_norm_(1.0)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped += scaler.get_scale() < before
        optimizer.zero_grad()
    print(kind, skipped, scaler.state_dict()["_growth_tracker"])
