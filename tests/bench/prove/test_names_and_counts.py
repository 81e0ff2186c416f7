"""Right programs that choose parameters by names, count elements, or train tensors of no module."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdpbench.answers.prove.verdict import Verdict

from .programs_on_ranks import TRAIN, gradients_of

RIGHT = {
    "groups by names that are written as DDP gives them": """
dist.init_process_group("nccl")
model = nn.parallel.DistributedDataParallel(net().cuda())
rates = {name: 0.1 / (1 + int(name.split(".")[1])) for name, _ in model.named_parameters()}
kept = [{"params": [p], "lr": rates[name]} for name, p in model.named_parameters() if name.endswith("bias")]
others = [p for name, p in model.named_parameters() if name in ("module.0.weight", "module.2.weight")]
optimizer = torch.optim.SGD([*kept, {"params": others, "weight_decay": 0.1}], lr=0.1)
"""
    + TRAIN,
    "groups by names from which the script takes FSDP1's part": """
dist.init_process_group("nccl")
model = FullyShardedDataParallel(net().cuda(), use_orig_params=True)
named = {name.replace("_fsdp_wrapped_module.", ""): p for name, p in model.named_parameters()}
frozen = [p for name, p in named.items() if name == "0.weight"]
others = [p for name, p in named.items() if name != "0.weight"]
optimizer = torch.optim.SGD([{"params": frozen, "lr": 0.0}, {"params": others}], lr=0.1)
"""
    + TRAIN,
    "an optimizer that another takes the place of, as its parameters were replaced": """
dist.init_process_group("nccl")
model = net().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
    + TRAIN,
    "a trained tensor of no module, reduced by hand": """
dist.init_process_group("nccl")
model = nn.parallel.DistributedDataParallel(net().cuda())
scale = torch.ones(8, device="cuda", requires_grad=True)
optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.1)
for step in range(5):
    for micro in range(2):
        ((model(data(2 * step + micro)) * scale).square().mean() / 2).backward()
    dist.all_reduce(scale.grad, op=dist.ReduceOp.AVG)
    optimizer.step()
    optimizer.zero_grad()
""",
    "updates that an optimizer distributes as the weights are": """
from torch.distributed.tensor import distribute_tensor
class Whole(torch.optim.SGD):
    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            update = p.grad.full_tensor()
            update = update / update.norm()
            p.sub_(distribute_tensor(update, p.device_mesh, p.placements), alpha=0.1)
dist.init_process_group("nccl")
model = net().cuda()
fully_shard(model)
optimizer = Whole(model.parameters(), lr=0.1)
"""
    + TRAIN,
    "a largest length to which batches are padded, no number of targets": """
dist.init_process_group("nccl")
model = net().cuda()
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    rows = 1 + (dist.get_rank() + step) % 4
    most = torch.tensor(rows, device="cuda")
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    x = torch.zeros(int(most), 8, device="cuda")
    x[:rows] = data(step)[:rows]
    (model(x).square().sum() / most / 8).backward()
    optimizer.step()
    optimizer.zero_grad()
""",
}


@pytest.mark.campaign
@pytest.mark.parametrize("name", RIGHT)
def test_gradients_are_right(name: str, tmp_path: Path) -> None:
    found = gradients_of(RIGHT[name], tmp_path, ranks=4)
    assert found.verdict is Verdict.OK, found


@pytest.mark.campaign
@pytest.mark.parametrize("names", ["name", 'name.removeprefix("_orig_mod.")'])
def test_a_layer_that_is_frozen_by_a_name_which_the_compiler_changes(names: str, tmp_path: Path) -> None:
    text = f"""
dist.init_process_group("nccl")
model = net().cuda()
fully_shard(model)
model = torch.compile(model)
for name, p in model.named_parameters():
    p.requires_grad_(not {names}.startswith("0."))
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
"""
    found = gradients_of(text + TRAIN, tmp_path)
    if names != "name":
        assert found.verdict is Verdict.OK, found
    else:
        assert found.verdict is Verdict.FINDING, found
        assert "2 of 2 parameters (0.bias, 0.weight)" in found.findings[0]
