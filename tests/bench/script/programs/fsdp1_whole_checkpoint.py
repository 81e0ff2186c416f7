"""FSDP1 with original parameters: a whole checkpoint on rank 0's host, and a resume from it."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from tiny import GPT, LENGTH, VOCAB, Block
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


def build():
    model = FSDP(
        GPT(),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.cuda.current_device(),
        use_orig_params=True,
        sync_module_states=True,
        limit_all_gathers=True,
    )
    decayed = [p for n, p in model.named_parameters() if n.endswith("weight")]
    others = [p for n, p in model.named_parameters() if not n.endswith("weight")]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=3e-4)


def train(model, optimizer, steps):
    for _ in range(steps):
        tokens = torch.randint(0, VOCAB, (2, LENGTH), device="cuda")
        model(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()


dist.init_process_group("nccl")
rank, path = dist.get_rank(), Path(sys.argv[1] if len(sys.argv) > 1 else "whole.pt")
model, optimizer = build()
train(model, optimizer, 2)
whole = (FullStateDictConfig(offload_to_cpu=True, rank0_only=True), FullOptimStateDictConfig(rank0_only=True))
with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, *whole):
    weights, states = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
if rank == 0:
    assert states["state"]["blocks.2.mlp.2.weight"]["exp_avg"].shape == (128, 512)
    assert states["state"]["head.weight"]["exp_avg_sq"].device.type == "cpu"
    torch.save({"model": weights, "optimizer": states, "step": 2}, path)
dist.barrier()

model, optimizer = build()
found = torch.load(path, map_location="cpu", mmap=True)
with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, *whole):
    model.load_state_dict(found["model"])
    flat = FSDP.optim_state_dict_to_load(model, optimizer, found["optimizer"] if rank == 0 else {})
optimizer.load_state_dict(flat)
assert found["step"] == 2
train(model, optimizer, 6)
