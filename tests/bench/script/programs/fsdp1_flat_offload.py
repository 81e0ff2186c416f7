"""FSDP1 with flat parameters on the host: CPU offload, a size-based policy, no_sync, old state-dict calls."""

import functools

import torch
import torch.distributed as dist
from tiny import GPT, LENGTH, VOCAB
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
model = FSDP(
    GPT(),
    auto_wrap_policy=functools.partial(size_based_auto_wrap_policy, min_num_params=50_000),
    cpu_offload=CPUOffload(offload_params=True),
    sharding_strategy=ShardingStrategy.FULL_SHARD,
    backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
    device_id=torch.cuda.current_device(),
    use_orig_params=False,
)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(8):
    tokens = torch.randint(0, VOCAB, (2, LENGTH), device="cuda")
    for _ in range(1):
        (model(tokens, tokens) / 2).backward()
    (model(tokens, tokens) / 2).backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 2:
        saved = FSDP.full_optim_state_dict(model, optimizer)
        if dist.get_rank() == 0:
            assert saved["state"]["embed.weight"]["exp_avg"].shape == (VOCAB, 128)
        optimizer.load_state_dict(FSDP.scatter_full_optim_state_dict(saved, model, optim=optimizer))
