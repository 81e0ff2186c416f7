"""What the small programs of these tests share, and the comparison of their gradients on real ranks."""

from __future__ import annotations

from pathlib import Path

from fsdpbench.answers.prove.parts import Request, prove
from fsdpbench.answers.prove.verdict import Part, PartVerdict
from fsdpbench.base.configuration.config import Config
from fsdpbench.cli.requests.script_request import script_config
from fsdpbench.launch import fork_server

HEAD = """
import os, torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
def data(step):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * dist.get_rank() + step)).cuda()
"""
TRAIN = """
for step in range(5):
    optimizer.zero_grad()
    model(data(step)).square().mean().backward()
    optimizer.step()
"""

SUMS = """
dist.init_process_group("nccl")
model = net().cuda()
fully_shard(model)
model.set_gradient_divide_factor(1.0)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(5):
    count = torch.zeros((), device="cuda")
    for micro in range(2):
        rows = data(2 * step + micro)[: 4 - dist.get_rank() % 2]
        model(rows).square().sum().backward()
        count += len(rows)
    dist.all_reduce(count)
    torch._foreach_div_([p.grad for p in model.parameters()], float({divisor}))
    optimizer.step()
    optimizer.zero_grad()
"""


def config_of(text: str, folder: Path) -> Config:
    """Return the configuration of a script, which is written to `folder`."""
    script = folder / "train.py"
    script.write_text(HEAD + text)
    fork_server.start("cpu")
    config = script_config({"script": script, "gpus": "4"}, ())
    assert config is not None
    return config


def gradients_of(text: str, folder: Path, ranks: int = 2) -> PartVerdict:
    """Compare the gradients of a script on real ranks."""
    (found,) = prove(Request(config_of(text, folder), frozenset({Part.GRADIENTS}), (ranks,))).parts
    return found
