"""Sharded training equals training in one process on all ranks' data, with SGD to 1e-5."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fsdp_cases import (
    Model,
    assert_close,
    full_dtensors,
    loss_of,
    our_full,
    shard_model,
    tokens_of,
    train,
    wrap_model,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

STEPS = 4


def alone(world: int) -> nn.Module:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        sum(loss_of(model, tokens_of(rank, step)) for rank in range(world)).div(world).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def case_equals_one_process(rank: int, *, front: str, world: int, **arguments: Any) -> None:
    torch.manual_seed(0)
    if front == "fully_shard":
        mesh = arguments.pop("mesh", (world,))
        names = ("replicate", "shard")[-len(mesh) :]
        model = shard_model(
            "impl", Model(), mesh=init_device_mesh("cpu", mesh, mesh_dim_names=names), **arguments
        )
        read: Any = full_dtensors
    else:
        model = wrap_model("impl", Model(), **arguments)
        read = our_full
    outcome = train(
        model, rank, lambda _: {}, lambda m: read(m, gradients=False), steps=STEPS, optimizer="SGD"
    )
    expected = {name: p.detach() for name, p in alone(world).named_parameters()}
    assert_close(outcome.parameters, expected, 1e-5)


@pytest.mark.parametrize("reshard", [True, False])
def test_fully_shard(two_ranks, reshard: bool) -> None:
    two_ranks.run(case_equals_one_process, front="fully_shard", world=2, reshard_after_forward=reshard)


def test_fully_shard_hybrid(four_ranks) -> None:
    four_ranks.run(case_equals_one_process, front="fully_shard", world=4, mesh=(2, 2))


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_flat(two_ranks, strategy: str) -> None:
    two_ranks.run(case_equals_one_process, front="flat", world=2, strategy=strategy)


@pytest.mark.parametrize("front", ["fully_shard", "flat"])
def test_one_rank(one_rank, front: str) -> None:
    one_rank.run(case_equals_one_process, front=front, world=1)
