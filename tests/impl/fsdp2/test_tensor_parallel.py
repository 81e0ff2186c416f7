"""Tensor parallelism inside ``fully_shard``: parameters that are ``DTensor``s before, on 2 x 2 ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fsdp_cases import (
    STEPS,
    Model,
    assert_close,
    assert_same_outcome,
    full_dtensors,
    loss_of,
    read_fully_shard,
    read_shards,
    recorded,
    shard_model,
    tokens_of,
    train,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdpbench import impl


def two_meshes() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def parallel_model(
    kind: str, mesh: DeviceMesh, seed: int = 0, width: int = 7, dims: Any = "dp", **arguments: Any
) -> nn.Module:
    """Rows of ``up`` and columns of ``down`` over tp. A width of 7 leaves uneven rows for dp."""
    torch.manual_seed(seed)
    model = Model(blocks=2, width=width)
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return shard_model(kind, model, mesh=mesh[dims], **arguments)


def assert_same_placements(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, mine), (_, other) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert isinstance(mine, DTensor)
        assert isinstance(other, DTensor)
        assert mine.placements == other.placements, f"{name}: {mine.placements}, {other.placements}"
        assert mine.device_mesh.mesh_dim_names == other.device_mesh.mesh_dim_names, name
        assert mine.to_local().shape == other.to_local().shape, name
        assert mine.shape == other.shape, name


def case_like_torch(rank: int, *, steps: int, **arguments: Any) -> None:
    mesh = two_meshes()
    outcomes, models = [], []
    for kind in ("impl", "torch"):
        models.append(parallel_model(kind, mesh, **arguments))
        # Ranks of one tp group compute on the same data.
        outcomes.append(train(models[-1], mesh["dp"].get_local_rank(), *read_shards, steps=steps))
    assert_same_placements(*models)
    assert_same_outcome(*outcomes)


@pytest.mark.plain_cases("bf16")
@pytest.mark.parametrize("policy", [None, (torch.bfloat16, torch.float32)], ids=["fp32", "bf16"])
@STEPS
def test_training_equals_torch(four_ranks, policy: Any, steps: int) -> None:
    four_ranks.run(case_like_torch, steps=steps, policy=policy)


def case_other_dim(rank: int) -> None:
    """``shard_placement_fn`` beside tensor parallelism: strided where both cut one dim, plain elsewhere."""
    case_like_torch(rank, steps=2, width=8, shard_placement_fn=lambda p: Shard(p.ndim - 1))


def case_replicas(rank: int) -> None:
    """Replicas, shards and tensor parallelism on a mesh of three dimensions."""
    for shape in ((2, 1, 2), (1, 2, 2)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard", "tp"))
        outcomes, models = [], []
        for kind in ("impl", "torch"):
            models.append(parallel_model(kind, mesh, dims=("replicate", "shard")))
            outcomes.append(train(models[-1], rank // 2, *read_shards, steps=2))
        assert_same_placements(*models)
        assert_same_outcome(*outcomes)


def case_smaller_groups(rank: int) -> None:
    """``reshard_after_forward`` as a number, which torch refuses for such parameters, changes no result."""
    mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "tp"))
    outcomes, sizes = [], []
    for reshard in (True, 2):
        model = parallel_model("impl", mesh, reshard_after_forward=reshard)
        with recorded("impl") as record:
            outcomes.append(train(model, rank, *read_fully_shard, steps=2))
        sizes.append({size for kind, size in record if kind == "all_gather"})
    assert_same_outcome(*outcomes)
    assert len(sizes[1]) > len(sizes[0])  # backward gathers without the padding for four ranks


def case_unsharded_parameters(rank: int) -> None:
    """Forward sees the tensor-parallel parameter again, and its gradient has the sharded placement."""
    mesh = two_meshes()
    model: Any = parallel_model("impl", mesh)
    seen: list[Any] = []

    def look(module: Any, *_: Any) -> None:
        seen.append(module.weight)

    model.blocks[0].up.register_forward_hook(look)
    loss_of(model, tokens_of(mesh["dp"].get_local_rank(), 0)).backward()
    assert isinstance(seen[0], DTensor)
    assert seen[0].device_mesh == mesh["tp"]
    assert seen[0].placements == (Shard(0),)
    weight = model.blocks[0].up.weight
    assert weight.grad.placements == weight.placements
    assert weight.grad.device_mesh.mesh_dim_names == ("dp", "tp")


def case_clip_and_state_dicts(rank: int) -> None:
    """Norms and state dicts, full and sharded, pass between torch's and ours."""
    mesh = two_meshes()
    models = {kind: parallel_model(kind, mesh, seed) for seed, kind in enumerate(("impl", "torch"))}
    for cpu, full in ((False, False), (False, True), (True, True)):
        options = StateDictOptions(full_state_dict=full, cpu_offload=cpu)
        for source, target in (("torch", "impl"), ("impl", "torch")):
            with torch.no_grad():
                for parameter in models[source].parameters():
                    parameter.add_(0.01)
            state = get_model_state_dict(models[source], options=options)
            if full:
                options = StateDictOptions(full_state_dict=True)
                if not state:  # with cpu_offload only rank 0 has it
                    assert rank != 0
                    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
                elif cpu:
                    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            set_model_state_dict(models[target], state, options=options)
            options = StateDictOptions(full_state_dict=full, cpu_offload=cpu)
            assert_close(full_dtensors(models[target], False), full_dtensors(models[source], False), 0)
    norms = []
    for model in models.values():
        loss_of(model, tokens_of(mesh["dp"].get_local_rank(), 3)).backward()
        cut = [p for p in model.parameters() if p.grad is not None and p.grad.device_mesh.ndim == 2]  # type: ignore[attr-defined]
        assert len(cut) == 8
        norm: Any = torch.nn.utils.clip_grad_norm_(cut, 0.01)
        norms.append(norm.full_tensor().item())
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    assert_close(full_dtensors(models["impl"], True), full_dtensors(models["torch"], True))


def case_accumulation(rank: int) -> None:
    """Two microbatches without communication, then one with; bf16 gradients kept in fp32."""
    mesh = two_meshes()
    found = []
    for kind in ("impl", "torch"):
        model: Any = parallel_model(kind, mesh, policy=(torch.bfloat16, torch.float32))
        for index in range(3):
            model.set_requires_gradient_sync(index == 2)
            loss_of(model, tokens_of(mesh["dp"].get_local_rank(), index)).backward()
        found.append(full_dtensors(model, True))
    assert_close(*found)


def case_refused(rank: int) -> None:
    other = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("a", "b"))
    linear = nn.Linear(4, 4)
    parallelize_module(linear, other["b"], ColwiseParallel())
    mesh = DeviceMesh("cpu", [0, 1, 2, 3])
    with pytest.raises(ValueError, match=r"'weight' is a DTensor on .* does not belong to the same mesh"):
        impl.fully_shard(linear, mesh=mesh)


CASES = [
    case_smaller_groups,
    case_replicas,
    case_other_dim,
    case_unsharded_parameters,
    case_clip_and_state_dicts,
    case_accumulation,
    case_refused,
]


@pytest.mark.plain_cases("clip_and_state_dicts", "accumulation")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.removeprefix("case_"))
def test_tensor_parallel(four_ranks, case: Any) -> None:
    four_ranks.run(case)
