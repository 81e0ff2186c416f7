"""``shard_placement_fn``: parameters cut on another dim than the first, and over a mesh of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fsdp_cases import (
    STEPS,
    assert_same_outcome,
    loss_of,
    read_fully_shard,
    read_shards,
    recorded,
    shard_model,
    tokens_of,
    train,
)
from fsdp_cases import Model as SharedModel
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_common as torch_common
from torch.distributed.tensor import DTensor, Shard
from torch_version import BEFORE_2_12

from fsdpbench import impl
from fsdpbench.impl.fsdp1.summon import gather_flat, split_full
from fsdpbench.impl.runtime.hooks import stage_of
from fsdpbench.impl.shared.placement import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult


class Model(SharedModel):
    """With a convolution, so that some parameter has dims in the middle."""

    def __init__(self) -> None:
        super().__init__(blocks=2, width=16)
        self.mix = nn.Conv2d(4, 2, kernel_size=4, padding="same", bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        side = x.view(x.shape[0], 4, -1, 16)
        x = x + self.mix(side).mean(dim=(1, 2))[:, None]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def by_dims(parameter: nn.Parameter) -> Any:
    """The last dim of a matrix, each of the middle dims of the convolution, the default for the rest."""
    if parameter.ndim == 4:
        return Shard(1)
    return Shard(-1) if parameter.ndim == 2 else None


def case_other_dims(rank: int, *, mesh: tuple[int, ...], steps: int, **arguments: Any) -> None:
    outcomes, records, models = [], [], []
    for kind in ("impl", "torch"):
        torch.manual_seed(0)
        names = ("replicate", "shard")[-len(mesh) :]
        arguments["mesh"] = init_device_mesh("cpu", mesh, mesh_dim_names=names)
        with recorded(kind) as record:
            models.append(shard_model(kind, Model(), shard_placement_fn=by_dims, **arguments))
            outcomes.append(train(models[-1], rank, *read_shards, steps=steps))
        records.append(record)
    assert_same_outcome(*outcomes)
    assert records[0] == records[1]
    for (name, ours), (_, theirs) in zip(*(model.named_parameters() for model in models), strict=True):
        assert isinstance(ours, DTensor)
        assert isinstance(theirs, DTensor)
        assert ours.placements == theirs.placements, name
        assert ours.to_local().shape == theirs.to_local().shape, name
        assert ours.stride() == theirs.stride(), name


@pytest.mark.parametrize("policy", [None, (torch.bfloat16, torch.float32)], ids=["fp32", "bf16"])
@STEPS
def test_other_dims_equal_torch(two_ranks, policy: Any, steps: int) -> None:
    two_ranks.run(case_other_dims, mesh=(2,), steps=steps, policy=policy)


@pytest.mark.parametrize("mesh", [(4,), (2, 2)], ids=str)
def test_other_dims_on_four_ranks_equal_torch(four_ranks, mesh: tuple[int, ...]) -> None:
    four_ranks.run(case_other_dims, mesh=mesh, steps=2)


def case_other_dims_and_smaller_groups(rank: int) -> None:
    """Torch cannot do these together; the numbers are those of the plain settings."""
    outcomes = []
    for arguments in ({}, {"shard_placement_fn": by_dims, "reshard_after_forward": 2}):
        torch.manual_seed(0)
        model = shard_model("impl", Model(), mesh=init_device_mesh("cpu", (4,)), **arguments)
        outcomes.append(train(model, rank, *read_fully_shard, steps=2))
    assert_same_outcome(*outcomes)


def test_other_dims_and_smaller_groups(four_ranks) -> None:
    four_ranks.run(case_other_dims_and_smaller_groups)


def choice(kind: str, block: Any) -> Any:
    """``up`` over pairs of ranks with replicas, ``down`` over pairs alone."""
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    if kind == "impl":
        result: Any = ShardPlacementResult
        hybrid: Any = HSDPMeshInfo(both)
        pairs: Any = FSDPMeshInfo(both["shard"])
    else:
        result = torch_common.ShardPlacementResult
        hybrid = torch_common.HSDPMeshInfo(both, shard_mesh_dim=1, replicate_mesh_dim=0)
        pairs = torch_common.FSDPMeshInfo(both["shard"], shard_mesh_dim=0)
    up, down = set(block.up.parameters()), set(block.down.parameters())

    def choose(parameter: nn.Parameter) -> Any:
        if parameter in up:
            return result(None, hybrid)
        return result(Shard(0), pairs) if parameter in down else Shard(0)

    return choose


def case_meshes_of_their_own(rank: int) -> None:
    outcomes, records = [], []
    for kind, api in (("impl", impl), ("torch", torch_fsdp)):
        mesh = init_device_mesh("cpu", (4,))
        torch.manual_seed(0)
        model = SharedModel(blocks=2)
        with recorded(kind) as record:
            for block in model.blocks:
                api.fully_shard(block, mesh=mesh, shard_placement_fn=choice(kind, block))
            api.fully_shard(model, mesh=mesh)
            outcomes.append(train(model, rank, *read_shards, steps=2))
        records.append(record)
    assert_same_outcome(*outcomes)
    assert sorted(records[0]) == sorted(records[1])


@pytest.mark.skipif(BEFORE_2_12, reason="torch 2.11 has one mesh for all parameters")
def test_meshes_of_their_own_equal_torch(four_ranks) -> None:
    four_ranks.run(case_meshes_of_their_own)


def case_refused(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))

    def attempt(result: Any, module: nn.Module | None = None) -> None:
        impl.fully_shard(
            nn.Linear(3, 4) if module is None else module, mesh=mesh, shard_placement_fn=lambda p: result
        )

    with pytest.raises(NotImplementedError, match=r"uneven sharding on dim 1: parameter 'weight' has 3"):
        attempt(Shard(1))
    with pytest.raises(AssertionError, match=r"for parameter 'weight' of shape \(4, 3\): it has no such dim"):
        attempt(Shard(2))
    with pytest.raises(ValueError, match=r"Invalid shard_placement_fn result: 1 for parameter 'weight'"):
        attempt(1)
    two = init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "replicate"))
    with pytest.raises(ValueError, match=r"shards over dimension 0 of 2 for parameter 'weight'"):
        attempt(ShardPlacementResult(Shard(0), FSDPMeshInfo(two, 0, 1)))


def test_refused(two_ranks) -> None:
    two_ranks.run(case_refused)


def case_state_after_loading(rank: int) -> None:
    """Values loaded into a model that ran are those it computes with, also where shards interleave."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    source = shard_model("impl", Model(), mesh=mesh, shard_placement_fn=by_dims)
    target = shard_model("impl", Model(), mesh=mesh, shard_placement_fn=by_dims)
    loss_of(target, tokens_of(rank, 0)).backward()
    for assign in (False, True):
        target.load_state_dict({k: v.clone() for k, v in source.state_dict().items()}, assign=assign)
        assert loss_of(target, tokens_of(rank, 1)).item() == loss_of(source, tokens_of(rank, 1)).item()


def case_full_parameters(rank: int) -> None:
    """Whole values outside of training, in the order of a unit's parameters."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    plain = dict(Model().named_parameters())
    torch.manual_seed(0)
    model = shard_model("impl", Model(), mesh=mesh, shard_placement_fn=by_dims)
    stage = stage_of(model)
    assert stage is not None
    (unit,) = stage.units
    for parameter, value in zip(
        unit.parameters, split_full(unit, gather_flat(unit, unit.shard)), strict=True
    ):
        assert torch.equal(value, plain[parameter.fqn]), parameter.fqn


def test_full_parameters(two_ranks) -> None:
    two_ranks.run(case_full_parameters)


def test_state_after_loading(two_ranks) -> None:
    two_ranks.run(case_state_after_loading)
