"""``dp_mesh_dims``: parameters that are ``DTensor`` objects on a mesh of all dimensions, as torch has it."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from fsdp_cases import assert_close, full_dtensors
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch_version import BEFORE_2_13

from fsdpbench import impl

pytestmark = pytest.mark.skipif(
    not hasattr(torch_fsdp, "DataParallelMeshDims"), reason="this torch has no dp_mesh_dims to compare with"
)

CUTS = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
"""Over the dimension ``tp``: rows of the first layer, columns of the second."""


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)

    def forward(self, x: Any) -> Any:
        return self.down(torch.relu(self.up(x)))


@cache
def mesh_of(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """One object for each mesh: torch wants parameters on the very one that it is given."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def on_mesh(model: nn.Module, mesh: DeviceMesh) -> None:
    for name, parameter in list(model.named_parameters()):
        cut = CUTS.get(name.partition(".")[2])
        placements = [
            Shard(cut) if axis == "tp" and cut is not None else Replicate()
            for axis in mesh.mesh_dim_names or ()
        ]
        module = model.get_submodule(name.rpartition(".")[0])
        whole = distribute_tensor(parameter.detach(), mesh, placements)
        setattr(module, name.rpartition(".")[2], nn.Parameter(whole))


def train(api: Any, mesh: DeviceMesh, dims: dict[str, Any], choose: Any, steps: int = 2) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(Layers(), Layers())
    on_mesh(model, mesh)
    arguments = {"mesh": mesh, "dp_mesh_dims": api.DataParallelMeshDims(**dims)}
    if choose is not None:
        arguments["shard_placement_fn"] = choose
    for layers in model:
        api.fully_shard(layers, **arguments)
    api.fully_shard(model, **arguments)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data_parallel = [axis != "tp" for axis in mesh.mesh_dim_names or ()]
    placements = [Shard(0) if parallel else Replicate() for parallel in data_parallel]
    coordinates = [
        c for c, parallel in zip(mesh.get_coordinate() or (), data_parallel, strict=True) if parallel
    ]
    for step in range(steps):
        generator = torch.Generator().manual_seed(
            100 * step + sum(c * 2**i for i, c in enumerate(coordinates))
        )
        batch = DTensor.from_local(torch.randn(2, 6, generator=generator), mesh, placements)
        out = model(batch).redistribute(mesh, placements)
        out.to_local().square().mean().backward()
        gradients = full_dtensors(model, gradients=True)
        optimizer.step()
        optimizer.zero_grad()
    return model, gradients


def last_dim(parameter: nn.Parameter) -> Shard:
    return Shard(parameter.ndim - 1)


def case_like_torch(
    rank: int,
    *,
    names: tuple[str, ...],
    dims: dict[str, Any],
    shape: tuple[int, ...] = (2, 2),
    other_dim: bool = False,
) -> None:
    mesh = mesh_of(shape, names)
    choose = last_dim if other_dim else None
    flattened = isinstance(dims.get("shard"), tuple)  # torch 2.12 shards twice along the same dimension
    ours, mine = train(impl, mesh, dims, choose)
    theirs, others = train(torch_fsdp, mesh, dims, choose)
    assert_close(mine, others)
    assert_close(full_dtensors(ours, False), full_dtensors(theirs, False))
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        if not flattened or not BEFORE_2_13:
            assert a.placements == b.placements
            assert a.device_mesh.mesh_dim_names == b.device_mesh.mesh_dim_names
        assert a.to_local().shape == b.to_local().shape


CASES: dict[str, dict[str, Any]] = {
    "beside tensor parallelism": {"names": ("dp", "tp"), "dims": {"shard": "dp"}},
    "right of tensor parallelism": {"names": ("tp", "dp"), "dims": {"shard": "dp"}},
    "on another dim": {"names": ("dp", "tp"), "dims": {"shard": "dp"}, "other_dim": True},
    "two dims as one": {"names": ("a", "b"), "dims": {"shard": ("a", "b")}},
    "replicas of shards": {"names": ("a", "b"), "dims": {"shard": "b", "replicate": "a"}},
    "replicas alone": {"names": ("dp", "tp"), "dims": {"replicate": "dp"}},
    "three dims": {"shape": (2, 1, 2), "names": ("a", "b", "tp"), "dims": {"shard": ("a", "b")}},
}


@pytest.mark.plain_cases("beside tensor parallelism", "replicas of shards", "two dims as one")
@pytest.mark.parametrize("name", CASES)
def test_equals_torch(four_ranks, name: str) -> None:
    four_ranks.run(case_like_torch, **CASES[name])


def case_errors(rank: int) -> None:
    mesh = mesh_of((2, 2), ("dp", "tp"))
    dims = impl.DataParallelMeshDims(shard="dp")
    with pytest.raises(ValueError, match="At least one of shard or replicate"):
        impl.DataParallelMeshDims()
    with pytest.raises(ValueError, match=r"'cp' not found in mesh\.mesh_dim_names"):
        impl.fully_shard(nn.Linear(2, 2), mesh=mesh, dp_mesh_dims=impl.DataParallelMeshDims("cp"))
    with pytest.raises(ValueError, match=r"plain tensor for parameter 'weight'"):
        impl.fully_shard(nn.Linear(2, 2), mesh=mesh, dp_mesh_dims=dims)
    with pytest.raises(NotImplementedError, match="reshard_after_forward=2 beside dp_mesh_dims"):
        impl.fully_shard(nn.Linear(2, 2), mesh=mesh, dp_mesh_dims=dims, reshard_after_forward=2)
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0), Replicate()]))
    with pytest.raises(ValueError, match=r"Expected Replicate\(\) on DP dim 'dp' .* parameter 'weight'"):
        impl.fully_shard(model, mesh=mesh, dp_mesh_dims=dims)


def test_errors(four_ranks) -> None:
    four_ranks.run(case_errors)
