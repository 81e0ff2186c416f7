"""Small programs that change modules, parameters and settings around ``fully_shard``: what comes of them, a
value or the type of an exception, is what comes of them with torch's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from host_cases import fake_group
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch_version import BEFORE_2_12, BEFORE_2_13

from fsdpbench import impl
from fsdpbench.impl.collectives import comm

Program = Callable[[Any, DeviceMesh], Any]
PROGRAMS: list[Program] = []


def program(function: Program) -> Program:
    PROGRAMS.append(function)
    return function


def linear() -> nn.Linear:
    return nn.Linear(8, 8)


def two() -> nn.Sequential:
    return nn.Sequential(linear(), linear())


def batch() -> torch.Tensor:
    return torch.ones(2, 8)


def nested(api: Any, mesh: DeviceMesh) -> Any:
    model = two()
    api.fully_shard(model[0], mesh=mesh)
    return api.fully_shard(model, mesh=mesh)


def trained(api: Any, mesh: DeviceMesh) -> Any:
    model = api.fully_shard(linear(), mesh=mesh)
    model(batch()).sum().backward()
    return model


# -- refused -------------------------------------------------------------------------------------------------


@program
def wrapped_twice(api: Any, mesh: DeviceMesh) -> None:
    api.fully_shard(api.fully_shard(linear(), mesh=mesh), mesh=mesh)


@program
def wrapped_twice_with_others(api: Any, mesh: DeviceMesh) -> None:
    api.fully_shard([api.fully_shard(linear(), mesh=mesh), linear()], mesh=mesh)


@program
def container(api: Any, mesh: DeviceMesh) -> None:
    api.fully_shard(nn.ModuleList([linear()]), mesh=mesh)


@program
def mesh_of_three_dimensions(api: Any, mesh: DeviceMesh) -> None:
    api.fully_shard(linear(), mesh=init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("a", "b", "c")))


@program
def mesh_without_names(api: Any, mesh: DeviceMesh) -> None:
    api.fully_shard(linear(), mesh=init_device_mesh("cpu", (1, 2)))


@program
def scalar(api: Any, mesh: DeviceMesh) -> None:
    module = nn.Module()
    module.gain = nn.Parameter(torch.tensor(1.0))
    api.fully_shard(module, mesh=mesh)


def placed(placement: Any) -> Program:
    return lambda api, mesh: (
        api.fully_shard(linear(), mesh=mesh, shard_placement_fn=lambda _: placement) and 0
    )


PROGRAMS += [placed(placement) for placement in (Shard(5), Shard(-9), Replicate(), 0)]


def freed(value: Any) -> Program:
    return lambda api, mesh: api.fully_shard(linear(), mesh=mesh, reshard_after_forward=value) and 0


PROGRAMS += [freed(value) for value in (3, 0, 0.5, "yes")]


@program
def tied_across_units(api: Any, mesh: DeviceMesh) -> None:
    model = two()
    model[1].weight = model[0].weight
    for module in (*model, model):
        api.fully_shard(module, mesh=mesh)
    model(batch())


@program
def inner_module_first(api: Any, mesh: DeviceMesh) -> None:
    model = nested(api, mesh)
    model[0](batch())
    model(batch())


@program
def several_modules_as_root(api: Any, mesh: DeviceMesh) -> None:
    model = two()
    api.fully_shard(list(model), mesh=mesh)
    model(batch())


@program
def one_of_two_dtypes(api: Any, mesh: DeviceMesh) -> None:
    model = api.fully_shard(two(), mesh=mesh)
    model[0].double()
    model(batch())


@program
def reset_below_the_root(api: Any, mesh: DeviceMesh) -> None:
    model = nested(api, mesh)
    model(batch())
    model[0].reset_iter_state()


@program
def prefetch_of_a_plain_module(api: Any, mesh: DeviceMesh) -> None:
    nested(api, mesh).set_modules_to_forward_prefetch([linear()])


@program
def method_that_is_not_there(api: Any, mesh: DeviceMesh) -> None:
    api.register_fsdp_forward_method(nested(api, mesh), "nothing")


@program
def deep_copy(api: Any, mesh: DeviceMesh) -> None:
    copy.deepcopy(nested(api, mesh))


@program
def stateless_copy(api: Any, mesh: DeviceMesh) -> None:
    other = linear()
    other.__class__ = type(api.fully_shard(linear(), mesh=mesh))
    other.reshard()


# -- served --------------------------------------------------------------------------------------------------


@program
def modules_inside_of_others(api: Any, mesh: DeviceMesh) -> list[str]:
    model = two()
    return [type(module).__name__ for module in api.fully_shard([model, model[0]], mesh=mesh)]


@program
def container_among_others(api: Any, mesh: DeviceMesh) -> None:
    api.fully_shard([nn.ModuleList([linear()]), linear()], mesh=mesh)


@program
def several_modules_unsharded_early(api: Any, mesh: DeviceMesh) -> Any:
    model = two()
    api.fully_shard(list(model), mesh=mesh)
    api.fully_shard(model, mesh=mesh)
    model[0].set_is_last_backward(True)
    model[0].unshard()
    shapes = [tuple(parameter.shape) for parameter in model.parameters()]
    model(batch()).sum().backward()
    return shapes, [parameter.grad is not None for parameter in model.parameters()]


@program
def patched_class(api: Any, mesh: DeviceMesh) -> list[float]:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 0

    first = api.fully_shard(Scaled(8, 8), mesh=mesh)
    found = [first(batch()).sum().item()]
    Scaled.forward = lambda self, x: nn.Linear.forward(self, x) * 0 + 1  # type: ignore[method-assign]
    second = api.fully_shard(Scaled(8, 8), mesh=mesh)
    return [*found, first(batch()).sum().item(), second(batch()).sum().item()]


@program
def loaded_in_place_of_parameters(api: Any, mesh: DeviceMesh) -> Any:
    model = trained(api, mesh)
    model.load_state_dict({name: value * 0 for name, value in model.state_dict().items()}, assign=True)
    output = model(batch())[:, :4].abs().sum().item()
    model.reshard()
    return output, model.weight.to_local().abs().sum().item()


@program
def loaded_in_another_dtype(api: Any, mesh: DeviceMesh) -> Any:
    model = api.fully_shard(two(), mesh=mesh)
    model(batch()).sum().backward()
    model.load_state_dict({k: v.bfloat16() for k, v in model.state_dict().items()}, assign=True)
    return [(p.dtype, p.to_local().dtype) for p in model.parameters()]


@program
def replaced_before_the_first_forward(api: Any, mesh: DeviceMesh) -> Any:
    model = api.fully_shard(linear(), mesh=mesh)
    weight = model.weight = nn.Parameter(model.weight.detach() * 0)
    model(batch()).sum().backward()
    return model.weight is weight, weight.grad is not None


@program
def new_data(api: Any, mesh: DeviceMesh) -> Any:
    model = trained(api, mesh)
    model.weight.data = model.weight.data * 0
    return model.weight.to_local().abs().sum().item() > 0, model(batch())[0, :4].abs().sum().item() > 0


@program
def frozen_while_unsharded(api: Any, mesh: DeviceMesh) -> Any:
    model = api.fully_shard(linear(), mesh=mesh)
    model.unshard()
    model.weight.requires_grad_(False)
    model(batch()).sum().backward()
    return model.weight.requires_grad, model.weight.grad is None


@program
def thawed_while_gathered(api: Any, mesh: DeviceMesh) -> Any:
    """What modules show is thawed after a forward that left the root gathered."""
    model = nested(api, mesh)
    model.requires_grad_(False)
    model(batch())
    model.requires_grad_(True)
    model(batch()).sum().backward()
    return [parameter.grad is not None for parameter in model.parameters()]


@program
def forward_mode_derivative(api: Any, mesh: DeviceMesh) -> Any:
    model = nested(api, mesh)
    output, tangent = torch.func.jvp(model, (batch(),), (batch(),))
    (output.sum() + tangent.sum()).backward()
    return tangent.shape, [parameter.grad is not None for parameter in model.parameters()]


@program
def reverse_mode_derivative(api: Any, mesh: DeviceMesh) -> Any:
    model = nested(api, mesh)
    return torch.func.grad(lambda x: model(x).sum())(batch()).shape


def outcome(run: Program, api: Any, mesh: DeviceMesh) -> tuple[str, Any]:
    torch.manual_seed(0)
    try:
        return "ok", run(api, mesh) or 0
    except Exception as error:
        return type(error).__name__, None


# torch 2.12 has neither reset_iter_state nor derivatives by torch.func.
NEW_IN_2_13 = {"reset_below_the_root", "forward_mode_derivative", "reverse_mode_derivative"}


def case_as_torch(rank: int) -> None:
    with fake_group():
        mesh = init_device_mesh("cpu", (2,))
        assert comm.averages(mesh.get_group(), torch.device("cpu"))
        found = [(run.__name__, outcome(run, impl, mesh), outcome(run, torch_fsdp, mesh)) for run in PROGRAMS]
    exempt = NEW_IN_2_13 if BEFORE_2_13 else set()
    if BEFORE_2_12:  # it shares parameters across units, and knows no result of shard_placement_fn but Shard
        exempt |= {"tied_across_units", "<lambda>"}
    different = [
        f"{name}: {ours}, torch {theirs}"
        for name, ours, theirs in found
        if ours != theirs and name not in exempt
    ]
    assert not different, "\n".join(different)
    refused = sum(theirs[0] != "ok" for _, _, theirs in found)
    assert refused > 20, refused


def test_as_torch(lone_process) -> None:
    lone_process.run(case_as_torch)
