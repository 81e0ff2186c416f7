"""One rank: no collectives, and without mixed precision no copies of parameters or gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fsdp_cases import Model, loss_of, recorded, shard_model, tokens_of, wrap_model
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from fsdpbench.impl.runtime.hooks import stage_of


class Count(TorchDispatchMode):
    """Counts the operators that run, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[str, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name
        self.names[name] = self.names.get(name, 0) + 1
        return function(*args, **(kwargs or {}))


def operators(model: Any, rank: int) -> dict[str, int]:
    loss_of(model, tokens_of(rank, 0)).backward()  # the first one makes views
    model.zero_grad()
    with Count() as count:
        loss_of(model, tokens_of(rank, 1)).backward()
    return count.names


def build(front: str) -> Any:
    torch.manual_seed(0)
    if front == "plain":
        return Model()
    if front == "fully_shard":
        return shard_model("impl", Model(), mesh=init_device_mesh("cpu", (1,)))
    return wrap_model("impl", Model(), use_orig_params=front == "original")


COPIES = (
    "aten::copy_",
    "aten::_foreach_copy_",
    "aten::split_with_sizes_copy",
    "aten::_chunk_cat",
    "aten::clone",
)


def case_no_collectives_no_copies(rank: int, *, front: str) -> None:
    plain = operators(build("plain"), rank)
    with recorded("impl") as collectives:
        wrapped = operators(build(front), rank)
    assert collectives == []
    for name in COPIES:
        assert wrapped.get(name, 0) == plain.get(name, 0), name


@pytest.mark.parametrize("front", ["fully_shard", "original"])
def test_no_collectives_no_copies(one_rank, front: str) -> None:
    one_rank.run(case_no_collectives_no_copies, front=front)


def case_parameters_are_the_shard(rank: int) -> None:
    model = build("fully_shard")
    model(tokens_of(rank, 0))
    for module in model.modules():
        stage = stage_of(module)
        for unit in stage.units if stage is not None else ():
            storage = unit.shard.untyped_storage().data_ptr()
            assert {p.untyped_storage().data_ptr() for p in unit.unsharded} == {storage}


def test_parameters_are_the_shard(one_rank) -> None:
    one_rank.run(case_parameters_are_the_shard)
