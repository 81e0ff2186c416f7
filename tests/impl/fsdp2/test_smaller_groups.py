"""``reshard_after_forward`` as a number: what the modules show between forward and backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from fsdp_cases import Model, full_dtensors, loss_of, shard_model, tokens_of
from host_cases import fake_group
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch_version import BEFORE_2_12

from fsdpbench import impl
from fsdpbench.impl.runtime.hooks import stage_of
from fsdpbench.impl.runtime.smaller_group import InSmallerGroup


def shown(model: Any) -> dict[str, Any]:
    """Form, mesh and local values of every parameter."""
    found: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            local = parameter.to_local().detach().clone()
            found[name] = (parameter.placements, parameter.device_mesh.mesh.tolist(), local)
        else:
            found[name] = ("plain", parameter.requires_grad, parameter.detach().clone())
    return found


def case_shown_parameters(rank: int) -> None:
    mesh = init_device_mesh("cpu", (4,))
    seen: dict[str, list[Any]] = {}
    for kind in ("impl", "torch"):
        torch.manual_seed(0)
        model: Any = shard_model(kind, Model(blocks=2), mesh=mesh, reshard_after_forward=2)
        steps = seen.setdefault(kind, [])
        for step in range(2):
            loss = loss_of(model, tokens_of(rank, step))
            steps.append(shown(model))
            loss.backward()
            steps.append(shown(model))
        loss_of(model, tokens_of(rank, 2))
        model.blocks[0].reshard()
        steps.append(shown(model.blocks[0]))
        steps.append(shown(model.blocks[1]))
        model.state_dict()
        steps.append(shown(model.blocks[1]))
    between = seen["impl"][0]["blocks.0.up.weight"]
    assert between[:2] == ((Replicate(), Shard(0)), [[0, 1], [2, 3]])
    for ours, theirs in zip(seen["impl"], seen["torch"], strict=True):
        assert ours.keys() == theirs.keys()
        for name, expected in theirs.items():
            assert ours[name][:2] == expected[:2], name
            assert ours[name][2].shape == expected[2].shape, name
            # Where rows do not divide by four, torch cuts its padded rows in two and shows other ones.
            if "up" in name or expected[0] != (Replicate(), Shard(0)):
                assert torch.equal(ours[name][2], expected[2]), name


def test_shown_parameters_equal_torch(four_ranks) -> None:
    four_ranks.run(case_shown_parameters)


def case_frozen_after_wrapping(rank: int) -> None:
    """What is shown between forward and backward follows what was frozen and thawed before it."""
    found = []
    for kind in ("impl", "torch"):
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (4,))
        model: Any = shard_model(kind, Model(blocks=2), mesh=mesh, reshard_after_forward=2)
        flags = []
        for trained in (True, False, True):
            model.blocks[0].requires_grad_(trained)
            loss = loss_of(model, tokens_of(rank, 0))
            flags.append({name: parameter.requires_grad for name, parameter in model.named_parameters()})
            loss.backward()
        found.append(flags)
    if not BEFORE_2_12:  # it shows what was trained when it was wrapped
        assert found[0] == found[1]
    assert not found[0][1]["blocks.0.up.weight"]


def test_frozen_after_wrapping(four_ranks) -> None:
    four_ranks.run(case_frozen_after_wrapping)


def case_memory(rank: int) -> None:
    """The larger shard is there between forward and backward only, and one mesh serves all units."""
    torch.manual_seed(0)
    model: Any = shard_model(
        "impl", Model(blocks=2), mesh=init_device_mesh("cpu", (4,)), reshard_after_forward=2
    )
    whole = full_dtensors(model, False)
    loss = loss_of(model, tokens_of(rank, 0))
    kept = model.blocks[0].up.weight
    smaller = [stage_of(block).units[0].gather for block in model.blocks]  # type: ignore[union-attr]
    assert smaller[0].group is smaller[1].group
    assert kept.device_mesh is model.blocks[1].up.weight.device_mesh
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor(), whole[name])
    assert kept.to_local().untyped_storage().size() > 0
    loss.backward()
    assert kept.to_local().untyped_storage().size() == 0


def test_memory(four_ranks) -> None:
    four_ranks.run(case_memory)


def case_groups_made_anew(rank: int) -> None:
    """A mesh that equals one of groups that were destroyed has groups of its own."""
    for _ in range(2):
        with fake_group():
            mesh = init_device_mesh("cpu", (8,))
            model = impl.fully_shard(nn.Linear(8, 8), mesh=mesh, reshard_after_forward=2)
            model.set_separate_reduce_scatter_group()
            (unit,) = model._hooks().stage.units
            assert isinstance(unit.gather, InSmallerGroup)
            alive = dist.distributed_c10d._world.pg_map
            assert {unit.gather.group, unit.groups.shard, unit.groups.reduce} <= set(alive)


def test_groups_made_anew(lone_process) -> None:
    lone_process.run(case_groups_made_anew)
