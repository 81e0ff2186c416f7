"""Training scripts that are right, in ways of their own: parallel models, reductions by hand, masters."""

from __future__ import annotations

from collections.abc import Mapping

from .gradient_mistakes import DDP, FSDP1, FSDP2, HALVES, HSDP, HYBRID1, NO_SYNC, ONE_BY_ONE, PARTS, TO_GPU

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
    "hybrid": {"wrap": HYBRID1 % "2, world // 2"},
    "ddp": {"wrap": DDP},
    "ddp_views": {"wrap": DDP.replace("(model)", "(model, gradient_as_bucket_view=True)")},
    "ddp_bf16_hook": {
        "wrap": f"{DDP}{_HOOKS}default_hooks as hooks\n"
        "model.register_comm_hook(None, hooks.bf16_compress_hook)\n"
    },
    "powersgd": {
        "wrap": f"{DDP}{_HOOKS}powerSGD_hook as ps\n"
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
    "clipped_no_sync": {"wrap": DDP, "step": (NO_SYNC % 0).replace("optimizer.step", _CLIP)},
    "outer_ddp": {"wrap": HALVES + _OUTER},
    "alone": {"wrap": "dist.destroy_process_group()\nmodel.to('cuda')"},
    "sync_batch_norm": {"model": _NORMED, "wrap": DDP},
    "compiled": {"wrap": FSDP2.replace("    fully", "    block.compile()\n    fully")},
    "closure": {"wrap": DDP, "step": _CLOSURE},
    "masters": {"wrap": DDP, "optimizer": _MASTERS, "step": _COPIED},
    "rare_optimizer": {
        "wrap": FSDP2,
        "optimizer": PARTS["optimizer"].replace("model.", "model.blocks.")
        + "\nother = torch.optim.SGD([*model.inner.parameters(), *model.head.parameters()], lr=0.1)",
    },
    "scaler": {"wrap": DDP, "step": _SCALED},
}
"""Parts of scripts in which nothing is wrong."""
