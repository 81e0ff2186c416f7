"""Hybrid sharding with the sum over replicas left to the last pass, where passes use different parameters."""

from __future__ import annotations

from typing import Any

import torch
from fsdp_cases import Block, assert_close, read_fully_shard
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdpbench import impl

WIDTH = 6


class Branching(nn.Module):
    """Each pass runs some of its blocks, and of the gates only one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(3))
        self.gates = nn.ParameterList(nn.Parameter(torch.ones(n)) for n in (3, 1, 4))
        self.runs: tuple[int, ...] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.runs:
            x = self.blocks[index](x) * self.gates[index].sum()
        return x


PASSES = [((0, 1), (1, 2), (2,)), ((0, 1, 2), (1,), (0,)), ((0,), (1,), (2,))]
"""Of each step, which blocks its passes run; nothing of the first pass may be lost."""


def gradients(rank: int, mesh: Any, late: bool) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    model: Any = Branching()
    for block in model.blocks:
        impl.fully_shard(block, mesh=mesh)
    impl.fully_shard(model, mesh=mesh)
    generator = torch.Generator().manual_seed(rank)
    found = []
    for passes in PASSES:
        for index, runs in enumerate(passes):
            model.runs = runs
            model.set_requires_all_reduce(not late or index == len(passes) - 1)
            model(torch.randn(2, WIDTH, generator=generator)).square().sum().backward()
        found.append(read_fully_shard[0](model))
        model.zero_grad()
    return found


def case_equal_to_summing_each_pass(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for late, each in zip(gradients(rank, mesh, True), gradients(rank, mesh, False), strict=True):
        assert {name for name, g in late.items() if g is None} == {n for n, g in each.items() if g is None}
        assert_close(late, each, 1e-5)


def test_equal_to_summing_each_pass(four_ranks: Any) -> None:
    four_ranks.run(case_equal_to_summing_each_pass)
