"""Programs of kinds that have no reference: the verdict is unknown, and says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdpbench.answers.prove.verdict import Verdict

from .programs_on_ranks import SUMS, TRAIN, gradients_of

NOT_JUDGED = {
    "experts that begin alike, exchanged by the script": (
        """
class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x.contiguous())
        return received
    @staticmethod
    def backward(ctx, gradient):
        return Exchange.apply(gradient)
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.expert = net(), net()
    def forward(self, x):
        return Exchange.apply(self.expert(Exchange.apply(self.dense(x))))
dist.init_process_group("nccl")
model = Experts().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    optimizer.zero_grad()
    model(data(step)).square().mean().backward()
    for p in model.dense.parameters():
        dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
    for p in model.expert.parameters():
        p.grad /= dist.get_world_size()
    optimizer.step()
""",
        "each rank may hold its own part of the model",
    ),
    "ranks with other blocks from the beginning": (
        """
dist.init_process_group("nccl")
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))).cuda()
every = list(model.parameters())
if dist.get_rank():
    del model[0]
optimizer = torch.optim.SGD(every, lr=0.1)
for step in range(5):
    model(data(step)).square().mean().backward()
    for p in every:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    optimizer.step()
    optimizer.zero_grad()
""",
        "rank 0 trains 2.bias, which rank 1 does not have",
    ),
    "a shard group of more ranks than are tried": (
        """
dist.init_process_group("nccl")
model = net().cuda()
fully_shard(model[0], reshard_after_forward=4)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
        + TRAIN,
        "4 do not fail so",
    ),
    "an own hook that sends integers": (
        """
def rounded(state, bucket):
    scale = bucket.buffer().abs().max() / 127
    dist.all_reduce(scale, op=dist.ReduceOp.MAX)
    sent = (bucket.buffer() / scale).round()
    future = dist.all_reduce(sent, async_op=True).get_future()
    return future.then(lambda done: done.value()[0] * scale / dist.get_world_size())
dist.init_process_group("nccl")
model = nn.parallel.DistributedDataParallel(net().cuda())
model.register_comm_hook(None, rounded)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
        + TRAIN,
        "as compression does by intention",
    ),
    "ranks that join() lets end early": (
        """
dist.init_process_group("nccl")
model = nn.parallel.DistributedDataParallel(net().cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with model.join():
    for step in range(2 + dist.get_rank()):
        model(data(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
""",
        "as join() lets them",
    ),
    "momentum that is kept of gradients which the script reduces": (
        """
dist.init_process_group("nccl")
model = net().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kept = [torch.zeros_like(p) for p in model.parameters()]
for step in range(5):
    model(data(step)).square().mean().backward()
    for own, p in zip(kept, model.parameters()):
        dist.all_reduce(p.grad)
        own.mul_(0.9).add_(p.grad / dist.get_world_size())
        p.grad = own.clone()
    optimizer.step()
    optimizer.zero_grad()
""",
        "the script itself reduces gradients and changes them",
    ),
    "signs that the script adds, as a vote": (
        """
dist.init_process_group("nccl")
model = net().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(5):
    model(data(step)).square().mean().backward()
    for p in model.parameters():
        vote = p.grad.sign()
        dist.all_reduce(vote)
        p.grad.copy_(vote.sign())
    optimizer.step()
    optimizer.zero_grad()
""",
        "train.py:18: the script sends whole numbers for gradients, as in a vote of signs",
    ),
    "signs of momentum that an optimizer gathers": (
        """
class Signs(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-3})
    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            own = self.state[p].setdefault("momentum", torch.zeros_like(p))
            own.lerp_(p.grad, 0.1)
            every = [torch.empty_like(p, dtype=torch.int8) for _ in range(dist.get_world_size())]
            dist.all_gather(every, own.sign().to(torch.int8))
            p.add_(torch.stack(every).sum(0).sign(), alpha=-1e-3)
dist.init_process_group("nccl")
model = net().cuda()
optimizer = Signs(model.parameters())
"""
        + TRAIN,
        "the script sends whole numbers for gradients, as in a vote of signs",
    ),
    "gradients of each sample by torch.func": (
        """
from torch.func import functional_call, grad, vmap
dist.init_process_group("nccl")
model = net().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
own = vmap(grad(lambda weights, x: functional_call(model, weights, (x[None],)).square().mean()), (None, 0))
for step in range(5):
    found = own({name: p.detach() for name, p in model.named_parameters()}, data(step))
    for name, p in model.named_parameters():
        p.grad = found[name].mean(0)
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    optimizer.step()
""",
        "functional_call, and its own weights, is not compared",
    ),
    "gradients of autograd.grad, added in a row": (
        """
dist.init_process_group("nccl")
model = net().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    found = torch.autograd.grad(model(data(step)).mean(), list(model.parameters()))
    for p, g in zip(model.parameters(), found):
        dist.all_reduce(g)
        p.grad = g / dist.get_world_size()
    optimizer.step()
""",
        "no gradient of a parameter was seen in a backward()",
    ),
    "weights of bfloat16, of which the optimizer has others in float32": (
        """
dist.init_process_group("nccl")
model = nn.Sequential(nn.LayerNorm(8), net()).cuda().bfloat16()
masters = [p.detach().float().requires_grad_() for p in model.parameters()]
optimizer = torch.optim.SGD(masters, lr=1e-3)
for step in range(5):
    model(data(step).bfloat16()).float().square().mean().backward()
    for own, p in zip(masters, model.parameters()):
        own.grad, p.grad = p.grad.float(), None
        dist.all_reduce(own.grad)
        own.grad /= dist.get_world_size()
    optimizer.step()
    for own, p in zip(masters, model.parameters()):
        p.data.copy_(own)
""",
        "an optimizer has other tensors, of which the script makes",
    ),
    "latents of a rank's own samples": (
        """
dist.init_process_group("nccl")
model = nn.parallel.DistributedDataParallel(net().cuda())
latents = data(0).requires_grad_()
optimizer = torch.optim.SGD([*model.parameters(), latents], lr=0.1)
for step in range(5):
    optimizer.zero_grad()
    (model(latents) - data(1)).square().mean().backward()
    optimizer.step()
""",
        "whether it is meant to be a rank's own is not known",
    ),
    "means that are divided by microbatches and ranks at once": (
        SUMS.format(divisor="2 * dist.get_world_size()").replace(".sum().backward()", ".mean().backward()"),
        "gradients are divided by 4 behind the backward",
    ),
    "weights that are averaged now and then": (
        """
dist.init_process_group("nccl")
model = net().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    model(data(step)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    for p in model.parameters() if step % 4 == 3 else ():
        dist.all_reduce(p.data)
        p.data /= dist.get_world_size()
""",
        "the script averages weights",
    ),
}
OF_HOOK = """
def own(state, bucket):
    future = dist.all_reduce(bucket.buffer() {what}, async_op=True).get_future()
    return future.then(lambda done: done.value()[0])
dist.init_process_group("nccl")
model = nn.parallel.DistributedDataParallel(net().cuda())
model.register_comm_hook(None, own)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
SPLIT = """
class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x
    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=pairs[dist.get_rank() // 2])
        return gradient
dist.init_process_group("nccl")
pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
torch.manual_seed(dist.get_rank() % 2)
model = nn.Linear(8, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    Sum.apply(model(data(step))).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.campaign
@pytest.mark.parametrize("name", NOT_JUDGED)
def test_what_cannot_be_compared_is_unknown(name: str, tmp_path: Path) -> None:
    text, words = NOT_JUDGED[name]
    found = gradients_of(text, tmp_path)
    assert found.verdict is Verdict.UNKNOWN, found
    assert words in found.summary


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("what", "words"), [("/ dist.get_world_size() ** 2", "ranks twice"), ("* 0 + 1", "")]
)
def test_a_faulty_hook_is_not_taken_for_a_compressing_one(what: str, words: str, tmp_path: Path) -> None:
    found = gradients_of(OF_HOOK.format(what=what) + TRAIN, tmp_path)
    assert found.verdict is (Verdict.FINDING if words else Verdict.UNKNOWN), found
    assert words in " ".join(found.findings)


@pytest.mark.campaign
def test_a_fault_beside_a_compressing_hook_is_found(tmp_path: Path) -> None:
    text = OF_HOOK.format(what=".bfloat16().float().round(decimals=2) / dist.get_world_size()")
    later = TRAIN.replace("model(data", "model.module(data")
    found = gradients_of(text + later, tmp_path)
    assert found.verdict is Verdict.FINDING, found
    assert "each rank keeps its own" in found.findings[0]


@pytest.mark.campaign
def test_a_program_that_steps_other_tensors_is_not_judged(tmp_path: Path) -> None:
    text = """
dist.init_process_group("nccl")
model = net().cuda()
weights = list(model.parameters())
flat = torch.cat([p.detach().reshape(-1) for p in weights])
own = flat.chunk(dist.get_world_size())[dist.get_rank()].clone().requires_grad_()
optimizer = torch.optim.SGD([own], lr=0.1)
for step in range(5):
    model(data(step)).square().mean().backward()
    whole = torch.cat([p.grad.reshape(-1) for p in weights])
    own.grad = torch.empty_like(own)
    dist.reduce_scatter_tensor(own.grad, whole)
    own.grad /= dist.get_world_size()
    optimizer.step()
    dist.all_gather_into_tensor(flat, own.detach())
    model.zero_grad()
    for p, part in zip(weights, flat.split([p.numel() for p in weights])):
        p.data.copy_(part.view_as(p))
"""
    found = gradients_of(text, tmp_path)
    assert found.verdict is Verdict.UNKNOWN, found


@pytest.mark.campaign
def test_a_model_that_is_split_by_hand_is_not_judged(tmp_path: Path) -> None:
    found = gradients_of(SPLIT, tmp_path, ranks=4)
    assert found.verdict is Verdict.UNKNOWN, found
    assert "splits its model" in found.summary
