"""FSDP1 with frozen weights and small trainable adapters: only their states are saved."""

import torch
import torch.distributed as dist
from tiny import GPT, LENGTH, VOCAB, Block
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


class Adapted(nn.Module):
    def __init__(self, base, rank=8):
        super().__init__()
        self.a, self.b = nn.Linear(base.in_features, rank, bias=False), nn.Linear(rank, base.out_features)
        self.base = base.requires_grad_(False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


dist.init_process_group("nccl")
model = GPT().requires_grad_(False)
for block in model.blocks:
    block.qkv, block.out = Adapted(block.qkv), Adapted(block.out)
model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block, Adapted}), device_id=0, use_orig_params=True)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
for step in range(8):
    tokens = torch.randint(0, VOCAB, (2, LENGTH), device="cuda")
    model(tokens, tokens).backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 2:
        states = FSDP.optim_state_dict(model, optimizer)["state"]
        assert states["blocks.1.out.b.weight"]["exp_avg"].shape == (128, 8), list(states)
        assert not any(".base." in name for name in states)
        options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
        print(len(get_model_state_dict(model, options=options)))
