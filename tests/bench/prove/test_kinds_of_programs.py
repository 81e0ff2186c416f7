"""Right programs of kinds that were judged wrongly: gradients are equal, or they are not judged."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from fsdpbench.answers.prove.real_runs import run_ranks
from fsdpbench.answers.prove.verdict import Verdict
from fsdpbench.script.real_ranks.host_cuda import OneNodeError, start_group
from fsdpbench.script.real_ranks.rank import Task, Way
from fsdpbench.script.real_ranks.watching import NotComparedError

from .programs_on_ranks import SUMS, TRAIN, config_of, gradients_of

SPAWNED = """
def main(gpu, gpus):
    dist.init_process_group("nccl", init_method="tcp://localhost:23456", world_size=gpus, rank=gpu)
    torch.cuda.set_device(gpu)
    model = nn.parallel.DistributedDataParallel(net().cuda(gpu), device_ids=[gpu])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        model(data(step)).square().mean().backward()
        optimizer.step()

if __name__ == "__main__":
    torch.multiprocessing.spawn(main, nprocs=torch.cuda.device_count(), args=(torch.cuda.device_count(),))
"""
OWN_OPTIMIZER = """
class Reducing(torch.optim.SGD):
    @torch.no_grad()
    def step(self):
        works = []
        for p in self.param_groups[0]["params"]:
            out = torch.empty_like(p.grad.chunk(dist.get_world_size())[0])
            work = dist.reduce_scatter_tensor(out, p.grad, op=dist.ReduceOp.SUM, async_op=True)
            works.append((p, out, work.get_future()))
        for p, out, future in works:
            future.wait()
            dist.all_gather_into_tensor(p.grad, out / {divisor})
        super().step()

dist.init_process_group("nccl")
model = net().cuda()
optimizer = Reducing(model.parameters(), lr=0.1)
"""
RIGHT = {
    "spawned": SPAWNED,
    "weights loaded onto the GPU": """
dist.init_process_group("nccl")
model = net().cuda()
torch.save(model.state_dict(), f"weights{dist.get_rank()}.pt")
for where in ("cuda", "cuda:0", {"cpu": "cuda"}, torch.device("cuda")):
    model.load_state_dict(torch.load(f"weights{dist.get_rank()}.pt", map_location=where))
model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
    + TRAIN,
    "FSDP1's mixed precision, which leaves inputs of inner units": """
from torch.distributed.fsdp import MixedPrecision
class Turned(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(8, 8)
    def forward(self, x, at):
        return x + self.inside(x * torch.sin(at)[:, None].to(x.dtype))
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.turned = net(), half(Turned())
    def forward(self, x):
        return self.turned(self.net(x), torch.arange(4) * 1001.5)
def half(module):
    return FullyShardedDataParallel(module, mixed_precision=MixedPrecision(torch.bfloat16, torch.float32))
dist.init_process_group("nccl")
model = half(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
    + TRAIN,
    "buffers that only rank 0 has, synchronised": """
class Turning(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = net()
        self.register_buffer("rates", 1.0 / torch.arange(1, 9), persistent=False)
    def forward(self, x):
        return self.inside(torch.sin(x * self.rates))
dist.init_process_group("nccl")
with torch.device("cpu" if dist.get_rank() == 0 else "meta"):
    model = Turning()
model = FullyShardedDataParallel(
    model, sync_module_states=True, param_init_fn=lambda module: module.to_empty(device="cuda", recurse=False)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
    + TRAIN,
    "tied weights in FSDP1 with original parameters": """
dist.init_process_group("nccl")
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
model[2].weight = model[0].weight
model = FullyShardedDataParallel(model.cuda(), use_orig_params=True, sync_module_states=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
    + TRAIN,
    "hybrid FSDP1, synchronised at first": """
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
dist.init_process_group("nccl")
model = FullyShardedDataParallel(
    net(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), sharding_strategy=ShardingStrategy.HYBRID_SHARD,
    device_id=torch.cuda.current_device(), sync_module_states=True,
)
assert torch.version.cuda and torch.cuda.is_bf16_supported()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
    + TRAIN,
    "an optimizer that reduces": OWN_OPTIMIZER.format(divisor="dist.get_world_size()") + TRAIN,
    "a moving average in forward": """
class Momentum(nn.Module):
    def __init__(self):
        super().__init__()
        self.online, self.target = net(), net().requires_grad_(False)
    def forward(self, x):
        for own, other in zip(self.online.parameters(), self.target.parameters()):
            other.data = 0.9 * other.data + 0.1 * own.data
        return self.online(x) - self.target(x)
dist.init_process_group("nccl")
model = nn.parallel.DistributedDataParallel(Momentum().cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
    + TRAIN,
    "an optimizer with random numbers": """
class Noisy(torch.optim.SGD):
    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            torch.rand_like(p.to_local())
        super().step()
dist.init_process_group("nccl")
model = net().cuda()
fully_shard(model)
torch.manual_seed(dist.get_rank())
optimizer = Noisy(model.parameters(), lr=0.1)
data = lambda step: torch.randn(4, 8, device="cuda")
"""
    + TRAIN,
    "an optimizer with a closure": """
dist.init_process_group("nccl")
model = net().cuda()
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def closure():
    optimizer.zero_grad()
    loss = model(data(step)).square().mean()
    loss.backward()
    return loss
for step in range(5):
    optimizer.step(closure)
""",
    "FlexAttention, profiled, autocast over norms of bfloat16": """
from torch.nn.attention.flex_attention import flex_attention
from torch.profiler import profile
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.own, self.norm = nn.Linear(8, 8), nn.LayerNorm(8).bfloat16()
    def forward(self, x):
        heads = self.own(self.norm(x)).view(1, 1, 4, 8)
        return torch.compile(flex_attention)(heads, heads, heads, score_mod=lambda s, b, h, q, k: s + q - k)
dist.init_process_group("nccl")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(Attention().cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with profile(record_shapes=True, with_stack=True, profile_memory=True) as prof:
    for step in range(5):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            model(data(step)).square().mean().backward()
        optimizer.step()
        prof.step()
prof.export_chrome_trace("trace.json")
print(prof.key_averages().table())
""",
    "compiled, with synchronised norms": """
dist.init_process_group("nccl")
model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(net(), nn.BatchNorm1d(8)))
model[0] = torch.compile(model[0])
model = nn.parallel.DistributedDataParallel(model.cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
    + TRAIN,
    "buffers that DDP's forwards change and rank 0 sends, also in no_sync() and evaluation": """
import contextlib
class Centered(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = net()
        self.register_buffer("center", torch.zeros(8))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
    def forward(self, x):
        out = self.inside(x)
        self.center.mul_(0.5).add_(out.detach().mean(0), alpha=0.5)
        self.count += 1 + dist.get_rank()
        return out * (1 + self.center) / self.count
dist.init_process_group("nccl")
model = nn.parallel.DistributedDataParallel(Centered().cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    for micro in range(3):
        with model.no_sync() if micro < 2 else contextlib.nullcontext():
            (model(data(3 * step + micro)).square().mean() / 3).backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 2:
        with torch.no_grad():
            model(data(99))
""",
    "norms that are trained, then frozen": """
dist.init_process_group("nccl")
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    model.train(step == 0)
    optimizer.zero_grad()
    model(data(step)).square().mean().backward()
    optimizer.step()
""",
    "sharpness-aware steps": """
dist.init_process_group("nccl")
model = nn.parallel.DistributedDataParallel(net().cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    optimizer.zero_grad()
    model(data(step)).square().mean().backward()
    with torch.no_grad():
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        moves = [0.05 * p.grad / norm for p in model.parameters()]
        torch._foreach_add_(list(model.parameters()), moves)
    optimizer.zero_grad()
    model(data(step)).square().mean().backward()
    with torch.no_grad():
        torch._foreach_sub_(list(model.parameters()), moves)
    optimizer.step()
""",
    "a first backward that only warms up": """
dist.init_process_group("nccl")
model = net().cuda()
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(data(77)).square().mean().backward()
"""
    + TRAIN,
    "gradients that a hook sends in bfloat16": """
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
dist.init_process_group("nccl")
model = nn.parallel.DistributedDataParallel(net().cuda())
model.register_comm_hook(None, bf16_compress_hook)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
    + TRAIN,
    "small gradients that FSDP2 reduces in float16": """
from torch.distributed.fsdp import MixedPrecisionPolicy
dist.init_process_group("nccl")
model = net().cuda()
fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    for micro in range(2):
        model.set_requires_gradient_sync(micro == 1)
        (model(data(2 * step + micro)).square().mean() * 1e-4).backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "parts of a loss, added by hand": """
dist.init_process_group("nccl")
model = net().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    (model(data(step)).square().mean() / dist.get_world_size()).backward()
    flat = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    dist.all_reduce(flat)
    for p, part in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()])):
        p.grad.copy_(part.view_as(p))
    optimizer.step()
    optimizer.zero_grad()
""",
    "parts of a loss, averaged by FSDP2 and multiplied by hand": """
dist.init_process_group("nccl")
model = net().cuda()
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    (model(data(step)).square().mean() / dist.get_world_size()).backward()
    for p in model.parameters():
        p.grad.mul_(dist.get_world_size())
    optimizer.step()
    optimizer.zero_grad()
""",
    "a norm of shards that FSDP2's ranks add by hand": """
dist.init_process_group("nccl")
model = net().cuda()
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    model(data(step)).square().mean().backward()
    local = [p.grad.to_local() for p in model.parameters()]
    total = torch.stack([each.square().sum() for each in local]).sum()
    dist.all_reduce(total)
    for each in local:
        each.mul_((0.01 / total.sqrt()).clamp(max=1.0))
    optimizer.step()
    optimizer.zero_grad()
""",
    "a norm of FSDP1's flat shards, added by hand beside a count": """
dist.init_process_group("nccl")
model = FullyShardedDataParallel(net().cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    model(data(step)).square().mean().backward()
    total = sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None)
    dist.all_reduce(total)
    count = torch.ones((), device="cuda")
    dist.all_reduce(count)
    assert count.item() == dist.get_world_size()
    for p in model.parameters():
        p.grad.mul_(min(1.0, 0.01 / float(total) ** 0.5))
    optimizer.step()
    optimizer.zero_grad()
""",
    "rows of an embedding as sparse gradients": """
dist.init_process_group("nccl")
torch.manual_seed(0)
model = nn.Sequential(nn.EmbeddingBag(50, 8, sparse=True), nn.Linear(8, 8)).cuda()
parallel = nn.parallel.DistributedDataParallel(model)
optimizers = torch.optim.SparseAdam(model[0].parameters()), torch.optim.AdamW(model[1].parameters())
for step in range(5):
    parallel(data(step).mul(100).long().abs() % 50).square().mean().backward()
    for each in optimizers:
        each.step()
        each.zero_grad()
""",
    "hooks that add each microbatch's gradients over ranks": """
dist.init_process_group("nccl")
model = net().cuda()
def added(gradient):
    whole = gradient.clone()
    dist.all_reduce(whole)
    return whole
for p in model.parameters():
    p.register_hook(added)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    for micro in range(2):
        (model(data(2 * step + micro)).square().mean() / 2 / dist.get_world_size()).backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "gradients that are added elsewhere after each microbatch": """
dist.init_process_group("nccl")
model = net().cuda()
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    added = [torch.zeros_like(p) for p in model.parameters()]
    for micro in range(2):
        (model(data(2 * step + micro)).square().mean() / 2).backward()
        for one, p in zip(added, model.parameters()):
            one += p.grad
        optimizer.zero_grad()
    for one, p in zip(added, model.parameters()):
        p.grad = one
    optimizer.step()
    optimizer.zero_grad()
""",
    "steps that all ranks skip together": """
dist.init_process_group("nccl")
model = nn.parallel.DistributedDataParallel(net().cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    loss = model(data(step)).square().mean() * (float("nan") if step == 3 and dist.get_rank() else 1.0)
    loss.backward()
    if step not in (1, 3):
        optimizer.step()
    optimizer.zero_grad()
""",
    "models of equal names, whose optimizers take turns and keep what the other's backward adds": """
dist.init_process_group("nccl")
generator, discriminator = net().cuda(), net().cuda()
for each in (generator, discriminator):
    fully_shard(each)
generates, judges = (torch.optim.Adam(each.parameters(), lr=1e-3) for each in (generator, discriminator))
for step in range(12):
    real, noise = data(2 * step), data(2 * step + 1)
    if step % 3 < 2:
        judges.zero_grad()
        (discriminator(generator(noise).detach()) - discriminator(real)).mean().backward()
        judges.step()
    else:
        generates.zero_grad()
        discriminator(generator(noise)).square().mean().backward()
        generates.step()
""",
    "backwards of two optimizers behind one forward": """
dist.init_process_group("nccl")
actor, critic = (nn.parallel.DistributedDataParallel(net().cuda()) for _ in range(2))
acts, judges = (torch.optim.Adam(each.parameters(), lr=1e-3) for each in (actor, critic))
for step in range(5):
    acts.zero_grad()
    judges.zero_grad()
    action, value = actor(data(step)), critic(data(step))
    (action - value.detach()).square().mean().backward()
    acts.step()
    (value - 1).square().mean().backward()
    judges.step()
""",
    "FSDP1 with original parameters, offloaded and clipped": """
from torch.distributed.fsdp import CPUOffload
dist.init_process_group("nccl")
model = FullyShardedDataParallel(net().cuda(), use_orig_params=True, cpu_offload=CPUOffload(True))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(5):
    model(data(step)).square().mean().backward()
    model.clip_grad_norm_(0.05)
    optimizer.step()
    optimizer.zero_grad()
""",
    "replicate": """
from torch.distributed._composable.replicate import replicate
dist.init_process_group("nccl")
model = replicate(net().cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
    + TRAIN,
    "replicate of FSDP2, with mixed precision": """
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import MixedPrecisionPolicy
dist.init_process_group("nccl")
model = net().cuda()
for each in (model[0], model[2], model):
    replicate(each, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
    + TRAIN,
    "two steps in all": """
dist.init_process_group("nccl")
model = nn.parallel.DistributedDataParallel(net().cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
    + TRAIN.replace("range(5)", "range(2)"),
    "gradients of two tasks, projected where they are opposed": """
dist.init_process_group("nccl")
model = nn.parallel.DistributedDataParallel(net().cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    both = []
    for sign in (1.0, -1.0):
        optimizer.zero_grad()
        (model(data(step)) - sign).square().mean().backward()
        both.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    one, two = both
    dot = torch.dot(one, two)
    merged = one + two if dot > 0 else (one - dot / two.dot(two) * two) + (two - dot / one.dot(one) * one)
    for p, part in zip(model.parameters(), merged.split([p.numel() for p in model.parameters()])):
        p.grad = part.view_as(p).clone()
    optimizer.step()
""",
    "sums that FSDP2 adds, divided by all tokens behind the last microbatch": SUMS.format(divisor="count"),
    "means that FSDP2 adds, divided by the script and clipped": SUMS.format(divisor="dist.get_world_size()")
    .replace(".sum().backward()", ".mean().backward()")
    .replace("[: 4 - dist.get_rank() % 2]", "")
    .replace("optimizer.step()", "nn.utils.clip_grad_norm_(model.parameters(), 0.01)\n    optimizer.step()"),
    "blocks that leave their list on some ranks": """
class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(net() for _ in range(3))
        for number, block in enumerate(self.blocks):
            block[0].weight.data.add_(0.01 * number)
    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x
dist.init_process_group("nccl")
deep = Deep().cuda()
model = nn.parallel.DistributedDataParallel(deep, find_unused_parameters=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
blocks = list(deep.blocks)
for step in range(5):
    out = (step + dist.get_rank()) % 3
    deep.blocks = nn.ModuleList(each for number, each in enumerate(blocks) if number != out)
    model(data(step)).square().mean().backward()
    deep.blocks = nn.ModuleList(blocks)
    optimizer.step()
    optimizer.zero_grad()
""",
}


def test_a_script_of_as_many_processes_as_it_finds_gpus_asks_for_one_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "here", "MASTER_PORT": "1"}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(os, "environ", {**there, "MASTER_PORT": "23456"})
    started: list[tuple[object, ...]] = []

    def start(world_size: int, rank: int) -> None:
        start_group(there, lambda *args, **_: started.append(args), world_size=world_size, rank=rank)

    with pytest.raises(OneNodeError):
        start(2, 1)
    with pytest.raises(NotComparedError, match="a script of 8 ranks among 4"):
        start(8, 1)
    start(-1, -1)
    start(4, 1)
    assert started == [("gloo",)] * 2
    assert os.environ["MASTER_PORT"] == "1"


@pytest.mark.campaign
def test_a_spawned_program_runs_on_all_ranks(tmp_path: Path) -> None:
    run = run_ranks(config_of(RIGHT["spawned"], tmp_path), tmp_path / "run", 2, 60.0, Task(Way.SHARDED, 1))
    assert run.steps
    assert not run.failure


@pytest.mark.campaign
@pytest.mark.parametrize("name", RIGHT)
def test_gradients_are_right(name: str, tmp_path: Path) -> None:
    found = gradients_of(RIGHT[name], tmp_path, ranks=4)
    assert found.verdict is Verdict.OK, found


@pytest.mark.campaign
def test_an_optimizer_that_reduces_only_some_is_found(tmp_path: Path) -> None:
    text = OWN_OPTIMIZER.format(divisor="dist.get_world_size()").replace('["params"]:', '["params"][:-1]:')
    found = gradients_of(text + TRAIN, tmp_path)
    assert found.verdict is Verdict.FINDING, found
    assert "weights differ between ranks after the step" in found.findings[0]


@pytest.mark.campaign
@pytest.mark.parametrize("low", ["bfloat16", "float16"])
def test_a_small_fault_is_found_where_only_reductions_are_low(low: str, tmp_path: Path) -> None:
    text = f"""
from torch.distributed.fsdp import MixedPrecisionPolicy
dist.init_process_group("nccl")
model = net().cuda()
fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.{low}))
model.set_gradient_divide_factor(1.1 * dist.get_world_size())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
    found = gradients_of(text + TRAIN, tmp_path, ranks=4)
    assert found.verdict is Verdict.FINDING, found
    assert "times as large" in found.findings[0]


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("assert step < 1", "AssertionError"),
        ("assert dist.get_rank() and step", "AssertionError"),
        ("assert type(next(model.parameters())) is nn.Parameter", "fails sharded, and runs unsharded"),
    ],
)
def test_an_error_is_a_finding_where_only_the_sharded_script_has_it(
    text: str, words: str, tmp_path: Path
) -> None:
    start = """
dist.init_process_group("nccl")
model = net().cuda()
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
    found = gradients_of(f"{start}{TRAIN}    {text}\n", tmp_path)
    assert found.verdict is (Verdict.FINDING if "fails" in words else Verdict.UNKNOWN), found
    assert words in " ".join([found.summary, *found.findings])
