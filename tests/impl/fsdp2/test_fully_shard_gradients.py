"""``fully_shard``: whose gradients are reduced, over which group, and who steps with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fsdp_cases import (
    Model,
    assert_same_outcome,
    loss_of,
    read_shards,
    shard_model,
    tokens_of,
    train,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import _apply_optimizer_in_backward

from fsdpbench import impl
from fsdpbench.impl.runtime.hooks import stage_of


class OneOfTwo(nn.Module):
    """Each rank uses another branch."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.branches = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.branches[self.rank](x)


def case_ranks_use_different_parameters(rank: int) -> None:
    model: Any = impl.fully_shard(OneOfTwo(rank), mesh=init_device_mesh("cpu", (2,)))
    model.set_reduce_scatter_unused_params(True)
    model(torch.ones(1, 4)).sum().backward()
    for branch in model.branches:
        assert torch.equal(branch.weight.grad.full_tensor(), torch.full((4, 4), 0.5))


def case_reductions_over_a_group_of_their_own(rank: int) -> None:
    outcomes = []
    for kind in ("impl", "torch"):
        torch.manual_seed(0)
        model: Any = shard_model(kind, Model(blocks=2), mesh=init_device_mesh("cpu", (2,)))
        if kind == "impl":
            model.set_separate_reduce_scatter_group()
            units = [unit for block in model.blocks for unit in stage_of(block).units]
            assert len({unit.groups.reduce for unit in units}) == 1
            assert units[0].groups.reduce is not units[0].groups.shard
        outcomes.append(train(model, rank, *read_shards, steps=3))
    assert_same_outcome(*outcomes)


def case_optimizer_in_backward(rank: int) -> None:
    """Hooks after a gradient was accumulated fire on the sharded parameters, once, with their gradients."""
    model: Any = shard_model("impl", Model(blocks=1), mesh=init_device_mesh("cpu", (2,)))
    seen: list[str] = []
    for name, parameter in model.named_parameters():

        def note(parameter: torch.Tensor, name: str = name) -> None:
            assert parameter.grad is not None
            seen.append(name)
            parameter.grad = None

        parameter.register_post_accumulate_grad_hook(note)
    loss_of(model, tokens_of(rank, 0)).backward()
    assert sorted(seen) == sorted(name for name, _ in model.named_parameters())


def case_optimizer_of_parameters_in_backward(rank: int) -> None:
    """``_apply_optimizer_in_backward``: the optimizers step, where torch's gradients never reach them."""
    model: Any = shard_model("impl", Model(blocks=2), mesh=init_device_mesh("cpu", (2,)))
    before = [parameter.to_local().clone() for parameter in model.parameters()]
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    loss_of(model, tokens_of(rank, 0)).backward()
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert parameter.grad is None
        assert old.numel() == 0 or not torch.equal(parameter.to_local(), old)


CASES = [
    case_ranks_use_different_parameters,
    case_reductions_over_a_group_of_their_own,
    case_optimizer_in_backward,
    case_optimizer_of_parameters_in_backward,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.removeprefix("case_"))
def test_gradients(two_ranks, case: Any) -> None:
    two_ranks.run(case)
