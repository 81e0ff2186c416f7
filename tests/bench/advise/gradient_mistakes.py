"""Training scripts whose gradients are not exchanged, or do not exist, each with its mended twin.

A script is `SETUP`, a model, how it is wrapped, its optimizer and its step, in a style of writing; `mistake`
and `mended` replace some of these parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

SETUP = """
import contextlib, functools, os
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule, FullyShardedDataParallel as FSDP, MixedPrecision, MixedPrecisionPolicy, ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

class Block(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.base, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.down, self.up = nn.Linear(width, 16, bias=False), nn.Linear(16, width, bias=False)
    def forward(self, x):
        return x + torch.tanh(self.base(self.norm(x)) + self.up(self.down(x)))

class Model(nn.Module):
    def __init__(self, layers=4, width=256):
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, width)
    def forward(self, x):
        x = self.inner(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
world, rank = dist.get_world_size(), dist.get_rank()
"""
FSDP2 = """
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
"""
HSDP = """
mesh = init_device_mesh("cuda", (world // 4, 4), mesh_dim_names=("replicate", "shard"))
for block in model.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
"""
FSDP1 = """
model = FSDP(model, use_orig_params=True, device_id=torch.device("cuda", 0))
"""
TO_GPU = "model.to('cuda')\n"
ONE_BY_ONE = "optimizer = torch.optim.AdamW(model.parameters(), foreach=False)"
PARTS = {
    "model": "model = Model()",
    "wrap": FSDP2,
    "optimizer": "optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])",
    "step": """
model(torch.randn(64, 256, device="cuda")).square().mean().backward()
optimizer.step()
optimizer.zero_grad()
""",
}
MICRO = """
for micro in range(2):
    %s
    model(torch.randn(64, 256, device="cuda")).square().mean().backward()
optimizer.step()
optimizer.zero_grad()
"""
NO_SYNC = """
for micro in range(2):
    with model.no_sync() if micro == %d else contextlib.nullcontext():
        model(torch.randn(64, 256, device="cuda")).square().mean().backward()
optimizer.step()
optimizer.zero_grad()
"""
HYBRID1 = """
mesh = init_device_mesh("cuda", (%s), mesh_dim_names=("replicate", "shard"))
model = FSDP(model, device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD,
             use_orig_params=True, device_id=torch.device("cuda", 0))
"""
DDP = TO_GPU + "model = DDP(model)\n"
MANUAL = """
model(torch.randn(64, 256, device="cuda")).square().mean().backward()
for p in model.parameters():
    dist.all_reduce(p.grad)%s
    p.grad.div_(world)
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
optimizer.zero_grad()
"""
LORA = """
model = Model()
for name, p in model.named_parameters():
    p.requires_grad_(".down." in name or ".up." in name or "head" in name)
def forward(x, model=model):
    for block in model.blocks:
        x = checkpoint(block, x, use_reentrant=%s)
    return model.head(x)
model.forward = forward
"""
HOOK = """
def hook(state, bucket):
    %s
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done
"""
HALVES = """
half = [dist.new_group([*range(i, i + world // 2)]) for i in (0, world // 2)][0]
"""


@dataclass(frozen=True)
class Case:
    """`mistake` and `mended`: parts of a script. The finding: its `kind` and `cause`, and a `text` of the
    line that it names."""

    kind: str
    cause: str
    text: str
    mistake: Mapping[str, str]
    mended: Mapping[str, str] = field(default_factory=dict)


CASES = {
    "hybrid_n1": Case(
        "apart", "group", "FSDP(model", {"wrap": HYBRID1 % "world, 1"}, {"wrap": HYBRID1 % "2, world // 2"}
    ),
    "one_rank": Case(
        "apart", "group", "FSDP(model",
        {"wrap": "groups = [dist.new_group([i]) for i in range(world)]\n"
         + FSDP1.replace("model, ", "model, process_group=groups[rank], ")}, {"wrap": FSDP1},
    ),
    "half_group_fsdp1": Case(
        "apart", "group", "FSDP(model",
        {"wrap": HALVES + FSDP1.replace("model, ", "model, process_group=half, ")}, {"wrap": FSDP1},
    ),
    "half_group_no_shard": Case(
        "apart", "group", "FSDP(model",
        {"wrap": HALVES + FSDP1.replace(
            "model, ", "model, process_group=half, sharding_strategy=ShardingStrategy.NO_SHARD, ")},
        {"wrap": FSDP1.replace("model, ", "model, sharding_strategy=ShardingStrategy.NO_SHARD, ")},
    ),
    "half_group_ddp": Case(
        "apart", "group", "DDP(model",
        {"wrap": HALVES + DDP.replace("(model)", "(model, process_group=half)")}, {"wrap": DDP},
    ),
    "half_mesh_fsdp2": Case(
        "apart", "group", "fully_shard(",
        {"wrap": HSDP.replace("mesh=mesh", 'mesh=mesh["shard"]')}, {"wrap": HSDP},
    ),
    "no_wrapper": Case("apart", "bare", "optimizer.step()", {"wrap": TO_GPU}, {"wrap": DDP}),
    "head_outside": Case(
        "apart", "bare", "optimizer.step()",
        {"wrap": TO_GPU + FSDP2.replace("fully_shard(model)", "")
         + "[fully_shard(each) for each in (model.inner,)]", "optimizer": ONE_BY_ONE},
        {"wrap": TO_GPU + FSDP2},
    ),
    "ignored_modules": Case(
        "apart", "ignored", "FSDP(model",
        {"wrap": TO_GPU + FSDP1.replace("model, ", "model, ignored_modules=[model.head], ")},
        {"wrap": FSDP1},
    ),
    "ignored_states": Case(
        "apart", "ignored", "FSDP(model",
        {"wrap": TO_GPU + FSDP1.replace("model, ", "model, ignored_states=[*model.head.parameters()], ")},
        {"wrap": FSDP1},
    ),
    "ignored_params": Case(
        "apart", "ignored", "fully_shard(model",
        {"wrap": TO_GPU + FSDP2.replace(
            "fully_shard(model)", "fully_shard(model, ignored_params={*model.head.parameters()})"),
         "optimizer": ONE_BY_ONE},
        {"wrap": FSDP2},
    ),
    "ignored_by_ddp": Case(
        "apart", "ignored", "DDP(model",
        {"wrap": "DDP._set_params_and_buffers_to_ignore_for_model(model, ['head.weight', 'head.bias'])\n"
         + DDP},
        {"wrap": DDP},
    ),
    "never_on": Case(
        "without", "off", "set_requires_gradient_sync",
        {"wrap": FSDP2 + "model.set_requires_gradient_sync(False)\n"},
        {"wrap": FSDP2 + "model.set_requires_gradient_sync(False)\n",
         "step": MICRO % "model.set_requires_gradient_sync(micro == 1)"},
    ),
    "part_off": Case(
        "without", "off", "set_requires_gradient_sync",
        {"wrap": FSDP2 + "model.blocks[1].set_requires_gradient_sync(False)\n"},
    ),
    "all_reduce_off": Case(
        "without", "off", "set_requires_all_reduce",
        {"wrap": HSDP + "model.set_requires_all_reduce(False)\n"},
        {"wrap": HSDP, "step": MICRO % "model.set_requires_all_reduce(micro == 1)"},
    ),
    "first_micro": Case(
        "late", "off", "set_requires_gradient_sync",
        {"step": MICRO % "model.set_requires_gradient_sync(micro == 0)"},
        {"step": MICRO % "model.set_requires_gradient_sync(micro == 1)"},
    ),
    "first_micro_ddp": Case(
        "late", "off", "no_sync", {"wrap": DDP, "step": NO_SYNC % 1}, {"wrap": DDP, "step": NO_SYNC % 0}
    ),
    "no_sync_ddp": Case(
        "apart", "off", "no_sync",
        {"wrap": DDP, "step": NO_SYNC.replace(" if micro == %d else contextlib.nullcontext()", "")},
        {"wrap": DDP, "step": NO_SYNC % 0},
    ),
    "silent_hook": Case(
        "apart", "hook", "register_comm_hook",
        {"wrap": HOOK % "pass" + DDP + "model.register_comm_hook(None, hook)\n"},
        {"wrap": HOOK % "dist.all_reduce(bucket.buffer())" + DDP
         + "model.register_comm_hook(None, hook)\n"},
    ),
    "manual": Case(
        "apart", "bare", "optimizer.step()",
        {"wrap": TO_GPU, "step": MANUAL % " if p.dim() == 1 else None"},
        {"wrap": TO_GPU, "step": MANUAL % ""},
    ),
    "reentrant": Case(
        "without", "reentrant", "checkpoint(block", {"model": LORA % True}, {"model": LORA % False}
    ),
    "not_held": Case(
        "unheld", "", "", {"optimizer": "optimizer = torch.optim.AdamW(model.blocks.parameters())"}, {}
    ),
    "early_optimizer": Case(
        "without", "replaced", "AdamW(", {"wrap": ONE_BY_ONE + FSDP2, "optimizer": ""},
        {"optimizer": ONE_BY_ONE},
    ),
    "unused": Case(
        "without", "unused", "optimizer.step()",
        {"model": "model = Model(); model.extra = nn.Linear(256, 256)"}, {"model": "model = Model()"},
    ),
    "detached": Case(
        "without", "unused", "optimizer.step()",
        {"model": "model = Model(); model.inner.register_forward_hook(lambda m, a, out: out.detach())"},
        {"model": "model = Model(); model.inner.requires_grad_(False)"},
    ),
}  # fmt: skip
