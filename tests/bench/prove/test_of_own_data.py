"""Ranks that part by what each makes of its own data, and what is sent without its gradient. Each program has
a fault, in the lines that end with `# fault`, and a right twin with those that end with `# right` instead."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fsdpbench.answers.prove.verdict import PartVerdict, Verdict
from fsdpbench.script.own_files import OwnFiles
from fsdpbench.script.real_ranks.loss_divisors import Divided, Term, divided, parted
from fsdpbench.script.real_ranks.pieces import kept_beside

from .programs_on_ranks import config_of, gradients_of

START = """
import torch.nn.functional as F
import torch.distributed.nn.functional as differentiable
dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.manual_seed(0)
ranks = dist.get_world_size()
"""
STEP = """
    optimizer.step()
    optimizer.zero_grad()
"""
DDP = """
model = nn.parallel.DistributedDataParallel(net().cuda())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
"""
PROGRAMS = {
    "a mean whose backward does not add": (
        """
class Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        total = x.clone()
        dist.all_reduce(total)
        return total / ranks
    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone() # right
        dist.all_reduce(gradient) # right
        return gradient / ranks # right
        return gradient # fault
"""
        + DDP
        + """
for step in range(5):
    out = model(data(step))
    (out - Mean.apply(out.mean(0))).square().mean().backward()
"""
        + STEP,
        "is not that of the joint loss",
    ),
    "statistics added in place": (
        DDP
        + """
for step in range(5):
    out = model(data(step))
    mean = out.mean(0)
    mean = differentiable.all_reduce(mean) # right
    with torch.no_grad(): # fault
        dist.all_reduce(mean) # fault
    (out - mean / ranks).square().mean().backward()
"""
        + STEP,
        "is not that of the joint loss",
    ),
    "what one rank computes for all": (
        DDP
        + """
for step in range(5):
    x = data(step)
    shift = model(x).mean(0)
    shift = differentiable.broadcast(shift, 0) # right
    dist.broadcast(shift, 0) # fault
    (model(x) - shift).square().mean().backward()
"""
        + STEP,
        "is not that of the joint loss",
    ),
    "a queue of a rank's own keys": (
        DDP
        + """
queue = F.normalize(torch.randn(16, 8, device="cuda"), dim=-1)
for step in range(5):
    x = data(step)
    F.cross_entropy(F.normalize(model(x), dim=-1) @ queue.t(), torch.arange(4).cuda()).backward()
    with torch.no_grad():
        keys = F.normalize(x, dim=-1)
        parts = [torch.empty_like(keys) for _ in range(ranks)] # right
        dist.all_gather(parts, keys) # right
        keys = torch.cat(parts) # right
        queue[torch.arange(len(keys)) + 4 * (step % 2)] = keys
"""
        + STEP,
        "gradients follow queue,",
    ),
    "a codebook of a rank's own codes": (
        """
class Quantised(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()
        self.register_buffer("codes", torch.randn(6, 8))
    def forward(self, x):
        z = self.net(x)
        chosen = F.one_hot(torch.cdist(z.detach(), self.codes).argmin(-1), 6).type_as(z)
        loss = F.mse_loss(z, chosen @ self.codes)
        with torch.no_grad():
            sums = torch.cat([chosen.t() @ z, chosen.sum(0)[:, None]], 1)
            dist.all_reduce(sums) # right
            self.codes.lerp_(sums[:, :-1] / (sums[:, -1:] + 1), 0.1)
        return loss
model = Quantised().cuda()
fully_shard(model)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(5):
    model(data(step)).backward()
"""
        + STEP,
        "gradients follow buffer codes,",
    ),
    "a coefficient that follows a rank's own loss": (
        DDP
        + """
beta = 0.3
for step in range(5):
    out = model(data(step))
    penalty = out.square().mean()
    ((out - 1).square().mean() + beta * penalty).backward()
    seen = penalty.detach().clone()
    dist.all_reduce(seen, op=dist.ReduceOp.AVG) # right
    beta *= 1 + seen.item()
"""
        + STEP,
        "times as much on some ranks as on others",
    ),
    "a schedule that follows a rank's own loss": (
        DDP
        + """
schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
for step in range(5):
    loss = (model(data(step)) - 1).square().mean()
    loss.backward()
    seen = loss.detach().clone()
    dist.all_reduce(seen) # right
    schedule.step(seen.item())
"""
        + STEP,
        "ranks differ in what ReduceLROnPlateau is given",
    ),
    "optimizers that leave out a parameter": (
        """
model = nn.parallel.DistributedDataParallel(net().cuda())
every = list(model.parameters())
last = 3 # fault
last = 4 # right
of_ranks = [every[:2], every[2:last]] # of two ranks
optimizer = torch.optim.Adam(of_ranks[dist.get_rank()], lr=1e-2)
for step in range(5):
    model(data(step)).square().mean().backward()
    optimizer.step()
    with torch.no_grad():
        for rank, own in enumerate(of_ranks):
            for parameter in own:
                dist.broadcast(parameter.data, rank)
    model.zero_grad()
""",
        "no rank's optimizer updates it",
    ),
    "gradients clipped before they are added": (
        """
model = net().cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(5):
    model(data(step)).square().mean().mul(9).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1) # fault
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= ranks
"""
        + STEP,
        "clipped by each rank, before",
    ),
    "a teacher of parameters that were replaced": (
        """
import copy
model = net().cuda()
teacher = copy.deepcopy(model).requires_grad_(False)
pairs = list(zip(teacher.parameters(), model.parameters())) # fault
fully_shard(model)
fully_shard(teacher, reshard_after_forward=True)
pairs = list(zip(teacher.parameters(), model.parameters())) # right
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(5):
    x = data(step)
    with torch.no_grad():
        target = teacher(x + 0.1)
    F.mse_loss(model(x), target).backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for one, other in pairs:
            one.mul_(0.9).add_(other, alpha=0.1)
""",
        "stays as it is with sharding",
    ),
}
SILENT = {
    "an own queue that only a log reads": DDP
    + """
queue = torch.randn(16, 8, device="cuda")
for step in range(5):
    x = data(step)
    out = model(x)
    print(float((out.detach() @ queue.t()).sum()))
    out.square().mean().backward()
    queue[:4] = x
"""
    + STEP,
    "states of each rank's own sequences": DDP
    + """
state = torch.zeros(4, 8, device="cuda")
for step in range(5):
    state = model(data(step) + state).detach()
    model(state).square().mean().backward()
"""
    + STEP,
    "classes mixed by a random share of each rank": DDP
    + """
import random
for step in range(5):
    share = random.Random(100 * step + dist.get_rank()).random()
    out = model(data(step))
    (share * out.square().mean() + (1 - share) * (out - 1).square().mean()).backward()
"""
    + STEP,
    "losses of ranks added for a log by a function": """
class Added(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        total = x.clone()
        dist.all_reduce(total)
        return total
    @staticmethod
    def backward(ctx, gradient):
        return gradient
"""
    + DDP
    + """
for step in range(5):
    Added.apply(model(data(step)).square().mean()).backward()
"""
    + STEP,
    "a vector for a log, added in place behind its backward": DDP
    + """
for step in range(5):
    each = model(data(step)).square().mean(0)
    each.mean().backward()
    dist.all_reduce(each)
    print(each.tolist())
"""
    + STEP,
}


def program_with(text: str, kept: str) -> str:
    """Return a program with its lines of one kind, `fault` or `right`."""
    other = {"fault": "right", "right": "fault"}[kept]
    lines = [line for line in text.splitlines() if not line.endswith(f"# {other}")]
    return START + re.sub(rf" # {kept}$", "", "\n".join(lines), flags=re.MULTILINE)


def _said(found: PartVerdict) -> str:
    return f"{found.summary} {found.findings}"


@pytest.mark.campaign
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_fault_is_found_and_its_twin_is_right(name: str, tmp_path: Path) -> None:
    text, words = PROGRAMS[name]
    folders = [tmp_path / kept for kept in ("fault", "right")]
    for folder in folders:
        folder.mkdir()
    found = gradients_of(program_with(text, "fault"), folders[0])
    assert any(words in each for each in found.findings), _said(found)
    twin = gradients_of(program_with(text, "right"), folders[1])
    assert twin.verdict is Verdict.OK, _said(twin)


@pytest.mark.campaign
@pytest.mark.parametrize("name", SILENT)
def test_what_gradients_do_not_follow_is_no_finding(name: str, tmp_path: Path) -> None:
    found = gradients_of(START + SILENT[name], tmp_path)
    assert found.verdict is Verdict.OK, _said(found)


@pytest.mark.campaign
def test_a_model_split_by_hand_is_not_judged(tmp_path: Path) -> None:
    text = """
class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        for each, dim in ((self.up, 0), (self.down, 1)):
            each.weight = nn.Parameter(each.weight.detach().chunk(ranks, dim)[dist.get_rank()].clone())
        self.up.bias = nn.Parameter(self.up.bias.detach().chunk(ranks)[dist.get_rank()].clone())
    def forward(self, x):
        return differentiable.all_reduce(self.down(self.up(x).relu())) / ranks
model = Part().cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(5):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).cuda()
    model(x).square().mean().backward()
"""
    found = gradients_of(START + text + STEP, tmp_path)
    assert found.verdict is Verdict.UNKNOWN, _said(found)
    assert "splits its model among ranks" in found.summary


def _backward(weight: float, elements: float = 8.0) -> Divided:
    return Divided("train.py:9", {"/Mean": Term(elements, weight, elements / weight, elements)})


def test_a_weight_that_parts_is_found_unless_it_follows_the_number_of_elements() -> None:
    equal, apart = [[_backward(0.5)], [_backward(0.5)]], [[_backward(0.5)], [_backward(0.75)]]
    assert parted([equal, equal, apart]) == ("train.py:9", [1.0, 1.5])
    assert parted([equal, equal]) is None
    assert parted([equal]) is None
    assert parted([apart, apart]) is None  # each rank's from the beginning: a random share, a task of its own
    by_tokens = [[_backward(0.5, 8.0)], [_backward(0.75, 12.0)]]
    assert parted([equal, by_tokens]) is None
    assert parted([equal, [[], [_backward(0.75)]]]) is None  # a rank without that term


def test_parted_reads_weights_from_the_graph() -> None:
    def step(*weights: float) -> list[list[Divided]]:
        x = torch.ones(3, requires_grad=True)
        return [[divided((x.square().mean() + weight * x.abs().mean()), "a.py:1")] for weight in weights]

    found = parted([step(0.2, 0.2), step(0.3, 0.2)])
    assert found is not None
    assert found[1] == pytest.approx([1.5, 1.0])


SCRIPT = """
class Own:
    def __init__(self, x):
        self.state = x
def main(look, x):
    own, number, whole, trained = Own(x + 1), 2.0, x.long(), x.clone().requires_grad_()
    return look()
"""


def test_tensors_of_functions_and_their_objects_are_kept_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = config_of(SCRIPT, tmp_path).script
    assert script is not None
    module = ModuleType("beside")
    module.__file__ = script.program[0]
    monkeypatch.setitem(sys.modules, "beside", module)
    exec(compile(SCRIPT, module.__file__, "exec"), vars(module))
    own_files = OwnFiles(script)
    found = module.main(lambda: kept_beside(own_files, sys._getframe(1)), torch.arange(3.0))
    assert {name: each.tolist() for name, each in found.items() if not name.startswith("buffer ")} == {
        "main.x": [0.0, 1.0, 2.0],
        "main.own.state": [1.0, 2.0, 3.0],
    }
