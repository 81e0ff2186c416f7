"""Mamba-2 of transformers (its PyTorch path) in a loop of one's own with `fully_shard`."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import Mamba2Config, Mamba2ForCausalLM

dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
config = Mamba2Config(
    vocab_size=32000,
    hidden_size=1024,
    num_hidden_layers=8,
    num_heads=32,
    head_dim=64,
    state_size=128,
    n_groups=1,
)
model = Mamba2ForCausalLM(config).cuda()
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for block in model.backbone.layers:
    fully_shard(block, mp_policy=policy)
fully_shard(model, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
for step in range(10):
    tokens = torch.randint(0, 32000, (4, 1024), device="cuda")
    loss = model(tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if dist.get_rank() == 0:
        print(step, loss.item())
dist.destroy_process_group()
