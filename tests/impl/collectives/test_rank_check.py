"""Ranks that use different parameters or modules are told so, each of them, before anything hangs."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from fsdp_cases import Model, assert_same_outcome, read_fully_shard, recorded, shard_model, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdpbench import impl
from fsdpbench.impl.collectives import agreement
from fsdpbench.impl.runtime.hooks import hooks_of


class Branches(nn.Module):
    """Two layers in one unit, of which one is used; and a unit that may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.extra = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, second: bool, extra: bool) -> torch.Tensor:
        x = self.second(x) if second else self.first(x)
        return self.extra(x) if extra else x


def build(check_ranks: bool | int, world: int = 2, **arguments: Any) -> Any:
    torch.manual_seed(0)
    arguments |= {"mesh": init_device_mesh("cpu", (world,)), "check_ranks": check_ranks}
    model = Branches()
    impl.fully_shard(model.extra, **arguments)
    return impl.fully_shard(model, **arguments)


def step(model: Any, second: bool, extra: bool = False) -> None:
    model(torch.ones(2, 4), second, extra).sum().backward()


def case_other_parameters(rank: int) -> None:
    model = build(True)
    with pytest.raises(RuntimeError) as raised:
        step(model, second=rank == 1)
    text = str(raised.value)
    assert "rank 0: reduction of unit 'root' without a gradient for 'second.weight', 'second.bias'" in text
    assert "rank 1: reduction of unit 'root' without a gradient for 'first.weight', 'first.bias'" in text
    assert "set_reduce_scatter_unused_params(True)" in text
    model.reset_iter_state()  # nothing was issued that the other rank did not issue, so training can go on
    step(model, second=True)
    assert model.second.weight.grad is not None
    assert model.first.weight.grad is None
    model.set_reduce_scatter_unused_params(True)
    step(model, second=rank == 1)  # the way out that the error names
    assert model.first.weight.grad is not None


def case_other_modules(rank: int) -> None:
    model = build(1)
    with pytest.raises(RuntimeError, match=r"rank 0: reduction of .*rank 1: all-gather of unit 'extra'"):
        step(model, second=False, extra=rank == 1)


def case_one_stays_away(rank: int) -> None:
    model = build(True)
    step(model, second=False)
    check = hooks_of(model).runtime.context.rank_check  # type: ignore[union-attr]
    assert check is not None
    check.timeout_s = 0.5
    if rank == 1:
        time.sleep(1.5)
    with pytest.raises(RuntimeError, match=r"rank 1 did not come .* rank 0: all-gather of unit 'root'"):
        step(model, second=False)


@pytest.mark.parametrize("case", [case_other_parameters, case_other_modules, case_one_stays_away])
def test_every_rank_is_told(two_ranks, case: Any) -> None:
    two_ranks.run(case)


def case_changes_nothing(rank: int, *, mesh: tuple[int, ...]) -> None:
    outcomes, records = [], []
    for check in (2, 0):
        torch.manual_seed(0)
        names = ("replicate", "shard")[-len(mesh) :]
        device_mesh = init_device_mesh("cpu", mesh, mesh_dim_names=names)
        before = sum(agreement.positions.values())
        model = shard_model("impl", Model(blocks=1), mesh=device_mesh, check_ranks=check)
        with recorded("impl") as record:
            outcomes.append(train(model, rank, *read_fully_shard, steps=4))
        records.append(record)
        # In two iterations: gathers of root and block, the latter's again in backward, and two reductions.
        per_iteration = 3 + 2 * len(mesh)
        assert sum(agreement.positions.values()) - before == check * per_iteration
    assert records[0] == records[1]
    assert_same_outcome(*outcomes, tolerance=0)


def test_checks_as_long_as_asked_and_changes_nothing(two_ranks) -> None:
    two_ranks.run(case_changes_nothing, mesh=(2,))


def test_replicas_are_compared_too(four_ranks) -> None:
    four_ranks.run(case_changes_nothing, mesh=(2, 2))


def test_wrong_setting() -> None:
    with pytest.raises(ValueError, match=r"check_ranks must be .* not -1"):
        impl.fully_shard(nn.Linear(2, 2), check_ranks=-1)
