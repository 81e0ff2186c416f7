"""Which gradients ranks exchange, and which parameters have none, is seen with its cause."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from conftest import RunScript

LOOP = """
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
for step in range(4):
    model(torch.randn(8, 64, device="cuda")).square().mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step(); optimizer.zero_grad()
"""
SETUP = """
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.utils.checkpoint import checkpoint
dist.init_process_group("nccl")
model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)).cuda()
"""


def findings(run_probe: RunScript, text: str) -> list[dict[str, Any]]:
    run = run_probe(SETUP + text + LOOP)
    assert run.result["status"] == "ok", run.cause
    found: list[dict[str, Any]] = run.result["script"]["observed"]["gradients"]["findings"]
    return found


def test_a_group_of_one_rank_exchanges_nothing_though_the_norm_is_reduced(run_probe: RunScript) -> None:
    (found,) = findings(
        run_probe,
        """
mesh = init_device_mesh("cuda", (8, 1), mesh_dim_names=("replicate", "shard"))
hybrid = ShardingStrategy.HYBRID_SHARD
model = FullyShardedDataParallel(model, device_mesh=mesh, sharding_strategy=hybrid, use_orig_params=True)
dist.all_reduce(torch.ones(1, device="cuda"))
""",
    )
    assert (found["kind"], found["cause"], found["count"]) == ("apart", "group", 6)
    assert found["shape"] == [8, 1]
    assert found["span"][2:] == [8, 105], "the call, not the line"


def test_a_reentrant_checkpoint_without_a_gradient_at_its_inputs_trains_nothing(run_probe: RunScript) -> None:
    (found,) = findings(
        run_probe,
        """
from torch.distributed.fsdp import fully_shard
fully_shard(model)
model.forward = lambda x: model[2](
    model[1](checkpoint(model[0], x, use_reentrant=True))
)
""",
    )
    assert (found["kind"], found["cause"], found["names"]) == ("without", "reentrant", ["0.weight", "0.bias"])
