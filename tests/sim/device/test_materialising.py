"""What a simulated model gets in place of its tensors of the meta device is what torch's `to_empty` gives."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsdpbench.sim import Simulation
from fsdpbench.sim.model.profile import load_profile
from fsdpbench.systems.wrapping import to_empty

pytestmark = pytest.mark.simulated


def simulated() -> torch.device:
    return torch.device("sim", 0)


def _start() -> Simulation:
    return Simulation.start(load_profile("a100-80gb"), 4, 4)


def _model() -> nn.Module:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Conv2d(2, 3, 3))
    model[2].to(memory_format=torch.channels_last)
    model[0].weight.requires_grad_(False)
    model.register_parameter("transposed", nn.Parameter(torch.empty(5, 7, device="meta").t()))
    return model


def _facts(tensor: torch.Tensor) -> tuple[object, ...]:
    kind = type(tensor), tensor.requires_grad, tensor.is_leaf
    return (
        *kind,
        tensor.device,
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.untyped_storage().nbytes(),
    )


def test_plain_tensors_are_as_torch_makes_them() -> None:
    simulation = _start()
    ours, torchs = _model(), _model()
    to_empty(ours, simulated())
    before = simulation.cpu_ns()
    torchs.to_empty(device=simulated())
    spent = simulation.cpu_ns() - before
    before = simulation.cpu_ns()
    to_empty(_model(), simulated())
    assert simulation.cpu_ns() - before == spent
    for module in (ours, torchs):
        assert all(tensor.device == simulated() for tensor in module.state_dict().values())
    found = [_facts(tensor) for tensor in ours.state_dict(keep_vars=True).values()]
    assert found == [_facts(tensor) for tensor in torchs.state_dict(keep_vars=True).values()]


def test_only_what_the_module_itself_holds() -> None:
    _start()
    model = _model()
    to_empty(model, simulated(), recurse=False)
    assert next(model.parameters()).device.type == "sim"
    assert {tensor.device.type for tensor in model[0].parameters()} == {"meta"}


def test_dtensors_are_as_torch_makes_them() -> None:
    _start().init_process_group()
    mesh = init_device_mesh("sim", (4,))
    ours, torchs = _sharded(mesh), _sharded(mesh)
    to_empty(ours, simulated())
    torchs.to_empty(device=simulated())
    for (name, mine), theirs in zip(ours.named_parameters(), torchs.parameters(), strict=True):
        assert isinstance(mine, DTensor), name
        assert isinstance(theirs, DTensor), name
        assert mine._spec == theirs._spec
        assert mine._spec.tensor_meta == theirs._spec.tensor_meta
        assert _facts(mine) == _facts(theirs)
        assert _facts(mine._local_tensor) == _facts(theirs._local_tensor)


def _sharded(mesh: DeviceMesh) -> nn.Module:
    with torch.device("meta"):
        model = nn.Linear(8, 6)
    for name, placement in (("weight", Shard(0)), ("bias", Replicate())):
        whole = model.get_parameter(name)
        sharded = distribute_tensor(copy.copy(whole.data), mesh, [placement])
        model.register_parameter(name, nn.Parameter(sharded))
    return model
