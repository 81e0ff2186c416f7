"""Training scripts whose gradients are not exchanged, or do not exist, each with its mended twin.

A script is `SETUP`, a model, how it is wrapped, its optimizer and its step, in a style of writing; `mistake`
and `mended` replace some of these parts.
"""

from __future__ import annotations

import re
import textwrap
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
_NO_SYNC = """
for micro in range(2):
    with model.no_sync() if micro == %d else contextlib.nullcontext():
        model(torch.randn(64, 256, device="cuda")).square().mean().backward()
optimizer.step()
optimizer.zero_grad()
"""
_HYBRID1 = """
mesh = init_device_mesh("cuda", (%s), mesh_dim_names=("replicate", "shard"))
model = FSDP(model, device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD,
             use_orig_params=True, device_id=torch.device("cuda", 0))
"""
_DDP = TO_GPU + "model = DDP(model)\n"
_MANUAL = """
model(torch.randn(64, 256, device="cuda")).square().mean().backward()
for p in model.parameters():
    dist.all_reduce(p.grad)%s
    p.grad.div_(world)
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
optimizer.zero_grad()
"""
_LORA = """
model = Model()
for name, p in model.named_parameters():
    p.requires_grad_(".down." in name or ".up." in name or "head" in name)
def forward(x, model=model):
    for block in model.blocks:
        x = checkpoint(block, x, use_reentrant=%s)
    return model.head(x)
model.forward = forward
"""
_HOOK = """
def hook(state, bucket):
    %s
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done
"""
_HALVES = """
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
        "apart", "group", "FSDP(model", {"wrap": _HYBRID1 % "world, 1"}, {"wrap": _HYBRID1 % "2, world // 2"}
    ),
    "one_rank": Case(
        "apart", "group", "FSDP(model",
        {"wrap": "groups = [dist.new_group([i]) for i in range(world)]\n"
         + FSDP1.replace("model, ", "model, process_group=groups[rank], ")}, {"wrap": FSDP1},
    ),
    "half_group_fsdp1": Case(
        "apart", "group", "FSDP(model",
        {"wrap": _HALVES + FSDP1.replace("model, ", "model, process_group=half, ")}, {"wrap": FSDP1},
    ),
    "half_group_no_shard": Case(
        "apart", "group", "FSDP(model",
        {"wrap": _HALVES + FSDP1.replace(
            "model, ", "model, process_group=half, sharding_strategy=ShardingStrategy.NO_SHARD, ")},
        {"wrap": FSDP1.replace("model, ", "model, sharding_strategy=ShardingStrategy.NO_SHARD, ")},
    ),
    "half_group_ddp": Case(
        "apart", "group", "DDP(model",
        {"wrap": _HALVES + _DDP.replace("(model)", "(model, process_group=half)")}, {"wrap": _DDP},
    ),
    "half_mesh_fsdp2": Case(
        "apart", "group", "fully_shard(block",
        {"wrap": HSDP.replace("mesh=mesh", 'mesh=mesh["shard"]')}, {"wrap": HSDP},
    ),
    "no_wrapper": Case("apart", "bare", "optimizer.step()", {"wrap": TO_GPU}, {"wrap": _DDP}),
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
         + _DDP},
        {"wrap": _DDP},
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
        "late", "off", "no_sync", {"wrap": _DDP, "step": _NO_SYNC % 1}, {"wrap": _DDP, "step": _NO_SYNC % 0}
    ),
    "no_sync_ddp": Case(
        "apart", "off", "no_sync",
        {"wrap": _DDP, "step": _NO_SYNC.replace(" if micro == %d else contextlib.nullcontext()", "")},
        {"wrap": _DDP, "step": _NO_SYNC % 0},
    ),
    "silent_hook": Case(
        "apart", "hook", "register_comm_hook",
        {"wrap": _HOOK % "pass" + _DDP + "model.register_comm_hook(None, hook)\n"},
        {"wrap": _HOOK % "dist.all_reduce(bucket.buffer())" + _DDP
         + "model.register_comm_hook(None, hook)\n"},
    ),
    "manual": Case(
        "apart", "bare", "optimizer.step()",
        {"wrap": TO_GPU, "step": _MANUAL % " if p.dim() == 1 else None"},
        {"wrap": TO_GPU, "step": _MANUAL % ""},
    ),
    "reentrant": Case(
        "without", "reentrant", "checkpoint(block", {"model": _LORA % True}, {"model": _LORA % False}
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

_TP = """
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
tp = init_device_mesh("cuda", (world,), mesh_dim_names=("tp",))
class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(256), nn.Linear(256, 1024), nn.Linear(1024, 256)
    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))
model = nn.Sequential(Mlp(), Mlp())
"""
_TP_WRAP = """
model.to("cuda")
for layer in model:
    parallelize_module(layer, tp, {"up": ColwiseParallel(), "down": RowwiseParallel()})
"""
_TP_FSDP = """
mesh = init_device_mesh("cuda", (world // 2, 2), mesh_dim_names=("dp", "tp"))
for layer in model:
    parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(layer, mesh=mesh["dp"])
fully_shard(model, mesh=mesh["dp"])
"""
_MEGATRON = """
class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x
    @staticmethod
    def backward(ctx, grad): dist.all_reduce(grad); return grad
class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): dist.all_reduce(x); return x
    @staticmethod
    def backward(ctx, grad): return grad
class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(256), nn.Linear(256, 1024 // world)
        self.down = nn.Linear(1024 // world, 256, bias=False)
    def forward(self, x):
        return x + Reduce.apply(self.down(torch.relu(self.up(Copy.apply(self.norm(x))))))
model = nn.Sequential(Mlp(), Mlp())
"""
_EXPERTS = """
class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = torch.empty_like(x); dist.all_to_all_single(out, x); return out
    @staticmethod
    def backward(ctx, grad):
        out = torch.empty_like(grad); dist.all_to_all_single(out, grad.contiguous()); return out
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.expert = nn.Linear(256, 256)
    def forward(self, x):
        return x + Exchange.apply(torch.relu(self.expert(Exchange.apply(x))))
model = nn.Sequential(nn.Linear(256, 256), Experts(), nn.Linear(256, 256))
"""
_EXPERTS_WRAP = """
model.to("cuda")
DDP._set_params_and_buffers_to_ignore_for_model(model, ["1.expert.weight", "1.expert.bias"])
model = DDP(model)
"""
_FLAT = """
model(torch.randn(64, 256, device="cuda")).square().mean().backward()
flat = torch._utils._flatten_dense_tensors([p.grad for p in model.parameters()])
dist.all_reduce(flat)
parts = torch._utils._unflatten_dense_tensors(flat / world, [*model.parameters()])
for p, part in zip(model.parameters(), parts):
    p.grad.copy_(part)
optimizer.step()
optimizer.zero_grad()
"""
_AVERAGED = """
model(torch.randn(64, 256, device="cuda")).square().mean().backward()
optimizer.step()
optimizer.zero_grad()
for p in model.parameters():
    dist.all_reduce(p.data); p.data.div_(world)
"""
_ZERO1 = """
class Sharded(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"]]
        flat = torch.cat([p.grad.flatten() for p in params])
        flat = torch.cat([flat, flat.new_zeros(-flat.numel() % world)])
        own = flat.new_empty(flat.numel() // world)
        dist.reduce_scatter_tensor(own, flat)
        dist.all_gather_into_tensor(flat, own * -0.1)
        offset = 0
        for p in params:
            p.add_(flat[offset : offset + p.numel()].view_as(p)); offset += p.numel()
optimizer = Sharded(model.parameters(), lr=0.1)
"""
_GAN = """
fake = model(torch.randn(64, 256, device="cuda"))
judge(fake.detach()).square().mean().backward()
second.step(); second.zero_grad()
judge(fake).square().mean().backward()
optimizer.step(); optimizer.zero_grad(); second.zero_grad()
"""
_POLICY = "MixedPrecisionPolicy(torch.bfloat16, torch.float32)"
_LOW = "MixedPrecision(torch.bfloat16, torch.bfloat16)"
_HOOKS = "from torch.distributed.algorithms.ddp_comm_hooks import "
_OUTER = """
other = [dist.new_group([i, i + world // 2]) for i in range(world // 2)][rank]
model.to("cuda")
model = DDP(DDP(model, process_group=half), process_group=other)
"""
_JUDGED = """
judge = nn.Linear(256, 1)
fully_shard(judge)
second = torch.optim.SGD(judge.parameters(), lr=0.1)
"""
_NORMED = """
model = nn.Sequential(nn.Linear(256, 256), nn.BatchNorm1d(256), nn.Linear(256, 256))
model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
"""
_SCALED = """
scaler = globals().setdefault("scaler", torch.amp.GradScaler("cuda"))
with torch.autocast("cuda", torch.float16):
    loss = model(torch.randn(64, 256, device="cuda")).square().mean()
scaler.scale(loss).backward()
scaler.unscale_(optimizer)
nn.utils.clip_grad_norm_(model.parameters(), 1.0)
scaler.step(optimizer); scaler.update(); optimizer.zero_grad()
"""
_CLOSURE = """
def closure():
    optimizer.zero_grad()
    loss = model(torch.randn(64, 256, device="cuda")).square().mean()
    loss.backward()
    return loss
optimizer.step(closure)
"""
_MASTERS = """
copies = [p.detach().clone().requires_grad_() for p in model.parameters()]
optimizer = torch.optim.SGD(copies, lr=0.1)
"""
_COPIED = """
model(torch.randn(64, 256, device="cuda")).square().mean().backward()
for copy, p in zip(copies, model.parameters()):
    copy.grad = p.grad.float()
optimizer.step(); optimizer.zero_grad(); model.zero_grad()
with torch.no_grad():
    for copy, p in zip(copies, model.parameters()):
        p.copy_(copy)
"""
_CLIP = "nn.utils.clip_grad_norm_(model.parameters(), 1.0)\noptimizer.step"


def _fsdp1(arguments: str) -> dict[str, str]:
    return {"wrap": FSDP1.replace("model, ", f"model, {arguments}, ")}


GOOD: dict[str, Mapping[str, str]] = {
    "fsdp2": {},
    "fsdp2_mixed": {"wrap": FSDP2.replace(")\n", f", mp_policy={_POLICY})\n")},
    "hsdp": {"wrap": HSDP},
    "hsdp_n1": {"wrap": HSDP.replace("(world // 4, 4)", "(world, 1)")},
    "fsdp1": {"wrap": FSDP1},
    "fsdp1_flat": {"wrap": FSDP1.replace("True", "False")},
    "fsdp1_blocks": _fsdp1("auto_wrap_policy=ModuleWrapPolicy({Block})"),
    "fsdp1_bf16": _fsdp1(f"mixed_precision={_LOW}"),
    "hybrid": {"wrap": _HYBRID1 % "2, world // 2"},
    "ddp": {"wrap": _DDP},
    "ddp_views": {"wrap": _DDP.replace("(model)", "(model, gradient_as_bucket_view=True)")},
    "ddp_bf16_hook": {
        "wrap": f"{_DDP}{_HOOKS}default_hooks as hooks\n"
        "model.register_comm_hook(None, hooks.bf16_compress_hook)\n"
    },
    "powersgd": {
        "wrap": f"{_DDP}{_HOOKS}powerSGD_hook as ps\n"
        "model.register_comm_hook(ps.PowerSGDState(None, 1, start_powerSGD_iter=2), ps.powerSGD_hook)\n"
    },
    "tensor_parallel": {"model": _TP, "wrap": _TP_WRAP, "optimizer": ONE_BY_ONE},
    "tp_and_fsdp": {"model": _TP, "wrap": _TP_FSDP, "optimizer": ONE_BY_ONE},
    "megatron": {"model": _MEGATRON, "wrap": TO_GPU},
    "experts": {"model": _EXPERTS, "wrap": _EXPERTS_WRAP},
    "flat_all_reduce": {"wrap": TO_GPU, "step": _FLAT},
    "averaged": {"wrap": TO_GPU, "step": _AVERAGED},
    "zero_1": {"wrap": TO_GPU, "optimizer": _ZERO1},
    "two_models": {"wrap": FSDP2, "step": _GAN, "optimizer": PARTS["optimizer"] + _JUDGED},
    "clipped_no_sync": {"wrap": _DDP, "step": (_NO_SYNC % 0).replace("optimizer.step", _CLIP)},
    "outer_ddp": {"wrap": _HALVES + _OUTER},
    "alone": {"wrap": "dist.destroy_process_group()\nmodel.to('cuda')"},
    "sync_batch_norm": {"model": _NORMED, "wrap": _DDP},
    "compiled": {"wrap": FSDP2.replace("    fully", "    block.compile()\n    fully")},
    "closure": {"wrap": _DDP, "step": _CLOSURE},
    "masters": {"wrap": _DDP, "optimizer": _MASTERS, "step": _COPIED},
    "rare_optimizer": {
        "wrap": FSDP2,
        "optimizer": PARTS["optimizer"].replace("model.", "model.blocks.")
        + "\nother = torch.optim.SGD([*model.inner.parameters(), *model.head.parameters()], lr=0.1)",
    },
    "scaler": {"wrap": _DDP, "step": _SCALED},
}
"""Parts of scripts in which nothing is wrong."""


def plain(parts: Mapping[str, str]) -> dict[str, str]:
    """Files of a script that stands at the top of one file."""
    step = textwrap.indent(parts["step"].strip(), "    ")
    head = "\n".join(parts[name] for name in ("model", "wrap", "optimizer"))
    return {"train.py": f"{SETUP}\n{head}\nfor step in range(8):\n{step}\n"}


def one_line(parts: Mapping[str, str]) -> dict[str, str]:
    """Statements in a row share a line; loops with one statement, too."""
    text = re.sub(r":\n +(?=fully_shard\(.*\)\n(?! ))", ": ", parts["wrap"])
    joined: list[str] = []
    for line in text.strip().splitlines():
        last = joined[-1] if joined else ""
        if all(
            re.match(r"(model|mesh|half|groups|other)\b", each) and _closed(each) for each in (line, last)
        ):
            joined[-1] += "; " + line
        else:
            joined.append(line)
    return plain({**parts, "wrap": "\n".join(joined)})


def _closed(line: str) -> bool:
    return line.count("(") == line.count(")") and not line.endswith(":")


def in_functions(parts: Mapping[str, str]) -> dict[str, str]:
    """Setup and model in a module of their own, which wraps, too."""
    body = textwrap.indent("\n".join(parts[name].strip() for name in ("model", "wrap")), "    ")
    helper = f"{SETUP}\ndef build():\n    global model\n{body}\n    return model\n"
    step = textwrap.indent(parts["step"].strip(), "    ")
    head = "import helper\nmodel = helper.build()\nfrom helper import *"
    optimizer = parts["optimizer"] or "optimizer = helper.optimizer"
    if not parts["optimizer"]:
        helper = helper.replace("global model", "global model, optimizer")
    return {"helper.py": helper, "train.py": f"{head}\n{optimizer}\nfor step in range(8):\n{step}\n"}


def in_a_class(parts: Mapping[str, str]) -> dict[str, str]:
    """A trainer."""
    head = "\n".join(parts[name].strip() for name in ("model", "wrap", "optimizer"))
    step = textwrap.indent(parts["step"].strip(), "        ")
    text = (
        f"{SETUP}\nclass Trainer:\n    def build(self):\n"
        "        global model, optimizer, judge, second, scaler, copies\n"
        f"{textwrap.indent(head, '        ')}\n    def step(self):\n{step}\n"
        "trainer = Trainer()\ntrainer.build()\nfor step in range(8):\n    trainer.step()\n"
    )
    return {"train.py": text}


STYLES = {"plain": plain, "one_line": one_line, "in_functions": in_functions, "in_a_class": in_a_class}


def script(parts: Mapping[str, str], style: str = "plain") -> dict[str, str]:
    """The files of a script, by name; `train.py` is what runs."""
    return STYLES[style](PARTS | dict(parts))
