"""Optimizer states of torch's FSDP1 in every form, printed as rank 0 sees them: on gloo ranks, or simulated.

python fsdp1_states.py STORE RANK RANKS      one of several processes on the CPU
fsdpbench run --script fsdp1_states.py       simulated
"""

import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

REAL = len(sys.argv) > 1
DEVICE = torch.device("cpu" if REAL else "cuda:0")
FULL = (StateDictType.FULL_STATE_DICT, FullStateDictConfig, FullOptimStateDictConfig)
SHARDED = (StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig, ShardedOptimStateDictConfig)


class Block(nn.Module):
    def __init__(self, frozen):
        super().__init__()
        self.frozen = nn.Linear(16, 16).requires_grad_(not frozen)
        self.last = nn.Sequential(nn.Linear(16, 7), nn.ReLU(), nn.Linear(7, 16, bias=False))

    def forward(self, x):
        return self.last(self.frozen(x))


def built(originals, kind, frozen):
    model = nn.Sequential(nn.Linear(16, 16), Block(frozen), Block(frozen), nn.Linear(16, 3)).to(DEVICE)
    model = FSDP(
        model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=DEVICE, use_orig_params=originals
    )
    trained = [p for p in model.parameters() if p.requires_grad]
    momentum = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    groups = [{"params": trained[:1], "weight_decay": 0.1}, {"params": trained[1:]}]
    return model, kind(groups, lr=0.01, **momentum)


def steps(model, optimizer, count):
    for _ in range(count):
        model(torch.ones(2, 16, device=DEVICE)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def shown(states):
    rows = []
    for name, found in states.get("state", {}).items():
        for key, value in found.items():
            row = [name, key, type(value).__name__]
            if isinstance(value, torch.Tensor):
                local = value.local_shards()[0].tensor if hasattr(value, "local_shards") else value
                local = getattr(local, "_local_tensor", local)
                device = local.device.type if REAL else local.device.type.replace("cuda", "cpu")
                row += [str(value.dtype), list(value.shape), list(local.shape), device]
            rows.append(row)
    groups = [{k: v for k, v in group.items() if k != "fused"} for group in states.get("param_groups", [])]
    return [sorted(rows), groups]


def by_context(model, optimizer, form, **options):
    kind, weights, states = form
    with FSDP.state_dict_type(model, kind, weights(**options), states(**options)):
        found = FSDP.optim_state_dict(model, optimizer)
        rows = shown(found)
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, found))
    return rows


def by_old_calls(model, optimizer):
    full = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    first = FSDP.full_optim_state_dict(model, optimizer)
    sharded = FSDP.sharded_optim_state_dict(model, optimizer)
    rows = [shown(full), shown(first), shown(sharded)]
    optimizer.load_state_dict(FSDP.shard_full_optim_state_dict(full, model, optim=optimizer))
    optimizer.load_state_dict(FSDP.scatter_full_optim_state_dict(first or None, model, optim=optimizer))
    optimizer.load_state_dict(FSDP.flatten_sharded_optim_state_dict(sharded, model, optimizer))
    return rows


def by_checkpoints(model, optimizer, full):
    # On the CPU torch would not copy what it then frees.
    options = StateDictOptions(full_state_dict=full, cpu_offload=full and not REAL)
    weights, states = get_state_dict(model, optimizer, options=options)
    rows = shown(states)
    options = StateDictOptions(full_state_dict=full, broadcast_from_rank0=full)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states, options=options)
    return rows


def main():
    if REAL:
        torch.set_num_threads(1)
        store, rank, world = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    else:
        dist.init_process_group("nccl")
    results = {}
    for originals, kind, frozen in (
        (True, torch.optim.AdamW, False),
        (True, torch.optim.AdamW, True),
        (True, torch.optim.SGD, False),
        (False, torch.optim.AdamW, False),
    ):
        model, optimizer = built(originals, kind, frozen)
        steps(model, optimizer, 2)
        case = f"{originals} {kind.__name__} {frozen}"
        results[f"{case} whole"] = by_context(model, optimizer, FULL)
        results[f"{case} sharded"] = by_context(model, optimizer, SHARDED)
        results[f"{case} on the host"] = by_context(model, optimizer, SHARDED, offload_to_cpu=True)
        results[f"{case} old"] = by_old_calls(model, optimizer)
        results[f"{case} checkpoint"] = by_checkpoints(model, optimizer, False)
        results[f"{case} whole checkpoint"] = by_checkpoints(model, optimizer, True)
        steps(model, optimizer, 1)
    if dist.get_rank() == 0:
        print(json.dumps(results, indent=0, sort_keys=True))


main()
