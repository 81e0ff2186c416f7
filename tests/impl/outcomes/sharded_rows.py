"""Situations of ``fully_shard``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from flat_programs import Side
from outcomes.flat_wrapping_rows import linear, two, x
from outcomes.rows import Program, Table
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

TABLE = Table()
row = TABLE.row
_MESHES: list[DeviceMesh] = []


def mesh() -> DeviceMesh:
    """One of both ranks, made once in each process: meshes have threads for good."""
    if not _MESHES:
        _MESHES.append(init_device_mesh("cpu", (2,), mesh_dim_names=("shard",)))
    return _MESHES[0]


def sharded(side: Side, module: nn.Module, **arguments: Any) -> Any:
    return side.api.fully_shard(module, mesh=mesh(), **arguments)


def nested(side: Side, **arguments: Any) -> Any:
    torch.manual_seed(0)
    model = two()
    sharded(side, model[0], **arguments)
    return sharded(side, model, **arguments)


# -- wrapping --


def _given(**arguments: Any) -> Program:
    def program(side: Side) -> None:
        model = sharded(side, linear(), **arguments)
        model(x()).sum().backward()

    return program


ARGUMENTS: dict[str, dict[str, Any]] = {
    "reshard_text": {"reshard_after_forward": "yes"},
    "reshard_half": {"reshard_after_forward": 0.5},
    "reshard_three": {"reshard_after_forward": 3},
    "reshard_zero": {"reshard_after_forward": 0},
    "reshard_negative": {"reshard_after_forward": -1},
    "reshard_one": {"reshard_after_forward": 1},
    "reshard_two": {"reshard_after_forward": 2},
    "precision_text": {"mp_policy": "bf16"},
    "precision_none": {"mp_policy": None},
    "offload_text": {"offload_policy": "cpu"},
    "offload_none": {"offload_policy": None},
    "placement_text": {"shard_placement_fn": lambda p: "x"},
    "placement_replicate": {"shard_placement_fn": lambda p: Replicate()},
    "placement_none": {"shard_placement_fn": lambda p: None},
    "placement_far": {"shard_placement_fn": lambda p: Shard(3)},
    "placement_negative": {"shard_placement_fn": lambda p: Shard(-1)},
    "placement_raises": {"shard_placement_fn": lambda p: [][1]},
    "placement_number": {"shard_placement_fn": 3},
    "ignored_list": {"ignored_params": []},
    "ignored_text": {"ignored_params": "weight"},
    "unknown": {"nonsense": 1},
}
TABLE.family("sharded_", {name: _given(**value) for name, value in ARGUMENTS.items()})


def _meshed(value: Callable[[], Any]) -> Program:
    def program(side: Side) -> None:
        side.api.fully_shard(linear(), mesh=value())

    return program


MESHES: dict[str, Callable[[], Any]] = {
    "text": lambda: "cpu",
    "number": lambda: 2,
    "three_dimensions": lambda: init_device_mesh("cpu", (1, 1, 2)),
    "two_without_names": lambda: init_device_mesh("cpu", (1, 2)),
    "two": lambda: init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b")),
}
TABLE.family("sharded_mesh_", {name: _meshed(value) for name, value in MESHES.items()})


def _of(make: Callable[[], Any]) -> Program:
    def program(side: Side) -> None:
        side.api.fully_shard(make(), mesh=mesh())

    return program


def _scalar() -> nn.Module:
    module = linear()
    module.scale = nn.Parameter(torch.tensor(1.0))
    return module


MODULES: dict[str, Callable[[], Any]] = {
    "list": lambda: nn.ModuleList([linear()]),
    "dict": lambda: nn.ModuleDict({"a": linear()}),
    "number": lambda: 3,
    "none": lambda: None,
    "several_with_a_number": lambda: [linear(), 3],
    "without_parameters": nn.ReLU,
    "parameter_list": lambda: nn.ParameterList([nn.Parameter(torch.ones(4))]),
    "scalar": _scalar,
}
TABLE.family("sharded_module_", {name: _of(make) for name, make in MODULES.items()}, quick=True)


@row()
def sharded_twice(side: Side) -> None:
    sharded(side, sharded(side, linear()))


@row()
def sharded_inside_of_flat(side: Side) -> None:
    module = two()
    sharded(side, module[0])
    side.wrap(module)


@row()
def flat_inside_of_sharded(side: Side) -> None:
    module = two()
    module[0] = side.wrap(module[0])
    sharded(side, module)(x()).sum().backward()


# -- methods --


def _called(call: Callable[[Any], Any], before: bool) -> Program:
    def program(side: Side) -> str | None:
        model = nested(side)
        if not before:
            model(x()).sum().backward()
        value = call(model)
        return None if value is None else str(hasattr(value, "wait"))

    return program


METHODS: dict[str, Callable[[Any], Any]] = {
    "reshard_after_forward_number": lambda m: m.set_reshard_after_forward(2),
    "reshard_after_forward_text": lambda m: m.set_reshard_after_forward("x"),
    "reshard_after_forward_none": lambda m: m.set_reshard_after_forward(None),
    "reshard_after_backward_text": lambda m: m.set_reshard_after_backward("x"),
    "forward_prefetch_plain": lambda m: m.set_modules_to_forward_prefetch([m[1]]),
    "forward_prefetch_module": lambda m: m.set_modules_to_forward_prefetch(m[0]),
    "forward_prefetch_none": lambda m: m.set_modules_to_forward_prefetch(None),
    "backward_prefetch_plain": lambda m: m.set_modules_to_backward_prefetch([m[1]]),
    "older_divide_factor": lambda m: m.set_reduce_scatter_divide_factor(2.0),
    "buffers_zero": lambda m: m.set_reduce_scatter_max_input_buffers(0),
    "buffers_text": lambda m: m.set_reduce_scatter_max_input_buffers("x"),
    "buffers_true": lambda m: m.set_reduce_scatter_max_input_buffers(True),
    "symmetric": lambda m: m.set_symm_mem_for_comm(),
    "hook_stream": lambda m: m.set_all_reduce_hook(lambda t: None, stream=3),
    "unshard": lambda m: m.unshard(),
    "unshard_async": lambda m: m.unshard(async_op=True),
    "unshard_twice": lambda m: (m.unshard(), m.unshard())[0],
    "reshard": lambda m: m.reshard(),
    "reset_inner": lambda m: m[0].reset_iter_state(),
    "last_backward_text": lambda m: m.set_is_last_backward("x"),
    "sync_text": lambda m: m.set_requires_gradient_sync("x"),
    "deep_copy": copy.deepcopy,
    "no_method": lambda m: m.nonsense(),
}
for _end, _before in (("_first", True), ("", False)):
    _named = {f"{name}{_end}": _called(call, _before) for name, call in METHODS.items()}
    TABLE.family("sharded_calls_", _named)


@row()
def forward_method_unknown(side: Side) -> None:
    side.api.register_fsdp_forward_method(nested(side), "nonsense")


@row()
def forward_method_of_a_plain_module(side: Side) -> None:
    side.api.register_fsdp_forward_method(linear(), "forward")


# -- parameters written to between forward and backward --

WRITES: dict[str, Callable[[nn.Parameter], Any]] = {
    "in_place": lambda p: p.mul_(0.5),
    "detached": lambda p: p.detach().mul_(0.5),
    "data_in_place": lambda p: p.data.mul_(0.5),
    "frozen": lambda p: p.requires_grad_(False),
}


def _written(how: str, reshard: bool) -> Program:
    def program(side: Side) -> str:
        model = nested(side, reshard_after_forward=reshard)
        loss = model(x()).square().sum()
        with torch.no_grad():
            for parameter in list(model.parameters()):
                WRITES[how](parameter)
        loss.backward()
        return str([parameter.grad is not None for parameter in model.parameters()])

    return program


for _reshard in (False, True):
    _kinds = {f"{how}_{'resharded' if _reshard else 'kept'}": _written(how, _reshard) for how in WRITES}
    TABLE.family("sharded_written_", _kinds, quick=not _reshard)


# -- extensions given after wrapping --


@row()
def extension_after_wrapping(side: Side) -> None:
    """Functions given to the local tensors, as to show that no subclass is needed."""

    def pre(self: torch.Tensor, *_: Any) -> Any:
        return (self.to(torch.bfloat16),), ()

    def post(self: torch.Tensor, outputs: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
        (given,) = outputs
        if out is not None:
            out.copy_(given.to(out.dtype))
            return None
        whole = given.to(dtype)
        return whole, (whole,)

    model = nested(side)
    for parameter in model.parameters():
        local = parameter._local_tensor
        local.fsdp_pre_all_gather = pre.__get__(local)
        local.fsdp_post_all_gather = post.__get__(local)
    for _ in range(2):
        model(x()).sum().backward()


# -- training --


@row()
def sharded_unit_ran_first(side: Side) -> None:
    model = nested(side)
    model[0](x()).sum().backward()
    model(x()).sum().backward()


@row()
def sharded_tied_across_units(side: Side) -> None:
    module = two()
    module[1].weight = module[0].weight
    sharded(side, module[0])
    sharded(side, module)(x()).sum().backward()


@row()
def sharded_on_meta(side: Side) -> None:
    with torch.device("meta"):
        module = linear()
    sharded(side, module)(x())


@row()
def sharded_forward_called_by_name(side: Side) -> None:
    nested(side).forward(x())


@row()
def sharded_backward_twice(side: Side) -> None:
    loss = nested(side)(x()).sum()
    loss.backward(retain_graph=True)
    loss.backward()


@row()
def sharded_load_plain_values(side: Side) -> None:
    model = nested(side)
    model.load_state_dict({name: torch.ones(8, 8) for name in model.state_dict()})


@row()
def sharded_load_missing(side: Side) -> None:
    model = nested(side)
    state = model.state_dict()
    del state["0.weight"]
    model.load_state_dict(state)


# -- optimizers that hold what nothing trains --


def _stepped(made: Callable[[Side], tuple[Any, Any]]) -> Program:
    """Train twice; ``made`` returns the model and the tensors for the optimizer."""

    def program(side: Side) -> None:
        model, parameters = made(side)
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        for _ in range(2):
            model(x()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    return program


def _made_before(side: Side) -> tuple[Any, Any]:
    model = two()
    parameters = list(model.parameters())
    return sharded(side, model), parameters


def _while_unsharded(side: Side) -> tuple[Any, Any]:
    model = nested(side)
    model[0].unshard()
    parameters = list(model.parameters())
    model[0].reshard()
    return model, parameters


def _after_evaluation(side: Side) -> tuple[Any, Any]:
    model = nested(side, reshard_after_forward=False)
    with torch.no_grad():
        model(x())
    return model, list(model.parameters())


def _before_the_last_wrap(side: Side) -> tuple[Any, Any]:
    model = two()
    sharded(side, model[0])
    parameters = list(model.parameters())
    return sharded(side, model), parameters


def _after_training(side: Side) -> tuple[Any, Any]:
    model = nested(side)
    model(x()).sum().backward()
    return model, list(model.parameters())


OPTIMIZED: dict[str, Callable[[Side], tuple[Any, Any]]] = {
    "made_before": _made_before,
    "while_unsharded": _while_unsharded,
    "after_evaluation": _after_evaluation,
    "before_the_last_wrap": _before_the_last_wrap,
    "after_training": _after_training,
}
_programs = {name: _stepped(made) for name, made in OPTIMIZED.items()}
TABLE.family("sharded_optimizer_", _programs, quick=True)
