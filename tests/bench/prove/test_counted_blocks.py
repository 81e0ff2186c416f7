"""Right programs that other numbers of ranks, blocks or steps made look wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdpbench.answers.prove.parts import Request, prove
from fsdpbench.answers.prove.verdict import Part, Verdict

from .programs_on_ranks import TRAIN, config_of, gradients_of

POLICY = """
dist.init_process_group("nccl")
model = net().cuda()
model = {wrapped}
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
length = 8 // dist.get_world_size()
rewards_to_go = torch.arange(length, 0, -1.0).cuda()
for step in range(5):
    seed = 100 * dist.get_rank() + step
    states = torch.randn(length, 8, generator=torch.Generator().manual_seed(seed)).cuda()
    optimizer.zero_grad()
    (-model(states).log_softmax(-1)[:, 0] * rewards_to_go).mean().backward()
"""

RIGHT = {
    "the gradient of a policy, averaged as one vector": POLICY.format(wrapped="model")
    + """    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for p, part in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()])):
        p.grad.copy_(part.view_as(p))
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
""",
    "a policy whose losses grow with the steps of its rank": POLICY.format(
        wrapped="nn.parallel.DistributedDataParallel(model)"
    )
    + "    optimizer.step()\n",
    "experts that the script counts itself": """
class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 6)
        self.experts = nn.ModuleList(net() for _ in range(6))
    def forward(self, x):
        weights = self.gate(x).softmax(-1)
        return sum(weights[:, number, None] * self.experts[number](x) for number in range(6))
dist.init_process_group("nccl")
model = Mixture().cuda()
for expert in model.experts:
    fully_shard(expert)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
    + TRAIN,
    "tables whose interactions are numbered": """
class Tables(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(16, 4, mode="sum") for _ in range(6))
        self.register_buffer("pairs", torch.tril_indices(7, 7, -1), persistent=False)
        self.dense, self.head = nn.Linear(8, 4), nn.Linear(21, 1)
    def forward(self, x):
        rows = (x.abs() * 100).long() % 16
        every = [table(rows[:, place : place + 3]) for place, table in enumerate(self.tables)]
        every = torch.stack([self.dense(x), *every], 1)
        return self.head((every @ every.mT)[:, self.pairs[0], self.pairs[1]])
dist.init_process_group("nccl")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(Tables().cuda())
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
"""
    + TRAIN,
}


@pytest.mark.campaign
@pytest.mark.parametrize("name", RIGHT)
def test_gradients_are_right(name: str, tmp_path: Path) -> None:
    found = gradients_of(RIGHT[name], tmp_path, ranks=4)
    assert found.verdict is Verdict.OK, found


@pytest.mark.campaign
def test_a_mesh_that_is_too_large_for_few_ranks_is_no_fault(tmp_path: Path) -> None:
    """FSDP1 reduces nothing over replicas where a shard group has one rank, as with 2 x 1, unlike 2 x 2."""
    text = """
from torch.distributed.device_mesh import init_device_mesh
dist.init_process_group("nccl")
mesh = init_device_mesh("cuda", (2, dist.get_world_size() // 2), mesh_dim_names=("replicas", "shards"))
model = FullyShardedDataParallel(net(), device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
    config = config_of(text + TRAIN, tmp_path)
    (found,) = prove(Request(config, frozenset({Part.GRADIENTS}), (4, 2))).parts
    assert found.verdict is Verdict.UNKNOWN, found
    assert "with 2 ranks alone" in found.summary
