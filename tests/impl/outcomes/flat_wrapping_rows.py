"""Situations while ``FullyShardedDataParallel`` wraps a module."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from flat_programs import CPU, Side
from outcomes.rows import Table
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import _apply_optimizer_in_backward

TABLE = Table()
row = TABLE.row
BOTH = {"modes": (False, True)}


def linear() -> nn.Linear:
    return nn.Linear(8, 8)


def two() -> nn.Sequential:
    return nn.Sequential(linear(), linear())


def x() -> torch.Tensor:
    return torch.ones(2, 8)


def trained(side: Side, module: nn.Module, **arguments: Any) -> Any:
    model = side.wrap(module, **arguments)
    model(x()).sum().backward()
    return model


# -- process groups, meshes and strategies --


def _group(value: Any, strategy: str) -> Any:
    def program(side: Side) -> None:
        side.strategy = side.api.ShardingStrategy[strategy]
        side.wrap(linear(), process_group=value())

    return program


GROUPS: dict[str, Any] = {
    "text": lambda: "world",
    "number": lambda: 3,
    "list": lambda: [dist.group.WORLD, dist.group.WORLD],
    "pair": lambda: (dist.group.WORLD, dist.group.WORLD),
    "mesh": lambda: init_device_mesh("cpu", (2,)),
    "one": lambda: (dist.group.WORLD,),
    "three": lambda: (dist.group.WORLD,) * 3,
    "pair_of_none": lambda: (None, None),
    "pair_of_texts": lambda: ("shard", "replicate"),
    "pair_with_mesh": lambda: (dist.group.WORLD, init_device_mesh("cpu", (2,))),
    "group": lambda: dist.group.WORLD,
    "empty": lambda: (),
}
for _strategy in ("FULL_SHARD", "HYBRID_SHARD", "NO_SHARD"):
    TABLE.family("group_", {f"{n}_{_strategy}": _group(value, _strategy) for n, value in GROUPS.items()})


def _mesh(value: Any, strategy: str) -> Any:
    def program(side: Side) -> None:
        side.strategy = side.api.ShardingStrategy[strategy]
        side.wrap(linear(), device_mesh=value())

    return program


MESHES: dict[str, Any] = {
    "text": lambda: "world",
    "group": lambda: dist.group.WORLD,
    "flat": lambda: init_device_mesh("cpu", (2,)),
    "two": lambda: init_device_mesh("cpu", (1, 2)),
    "three": lambda: init_device_mesh("cpu", (1, 1, 2)),
}
for _strategy in ("FULL_SHARD", "HYBRID_SHARD"):
    TABLE.family("mesh_", {f"{n}_{_strategy}": _mesh(value, _strategy) for n, value in MESHES.items()})


@row()
def group_and_mesh(side: Side) -> None:
    side.wrap(linear(), process_group=dist.group.WORLD, device_mesh=init_device_mesh("cpu", (2,)))


@row()
def hybrid_by_hand(side: Side) -> None:
    side.strategy = side.api.ShardingStrategy.HYBRID_SHARD
    side.wrap(linear())


@row()
def strategy_text(side: Side) -> None:
    side.strategy = "FULL_SHARD"
    trained(side, linear())


@row()
def strategy_number(side: Side) -> None:
    side.strategy = 7
    trained(side, linear())


def _alone() -> dist.ProcessGroup:
    groups = [dist.new_group([rank]) for rank in range(2)]
    return groups[dist.get_rank()]


@row(**BOTH, quick=True)
def one_rank_full(side: Side) -> str:
    return trained(side, linear(), process_group=_alone()).sharding_strategy.name


@row(**BOTH)
def one_rank_grad_op(side: Side) -> str:
    side.strategy = side.api.ShardingStrategy.SHARD_GRAD_OP
    return trained(side, linear(), process_group=_alone()).sharding_strategy.name


@row()
def one_rank_no_shard(side: Side) -> str:
    side.strategy = side.api.ShardingStrategy.NO_SHARD
    return trained(side, linear(), process_group=_alone()).sharding_strategy.name


@row()
def one_rank_default(side: Side) -> str:
    side.strategy = None
    return trained(side, linear(), process_group=_alone()).sharding_strategy.name


@row()
def one_rank_policy(side: Side) -> int:
    model = trained(side, two(), process_group=_alone(), auto_wrap_policy=side.policy_of({nn.Linear}))
    return len(side.api.FullyShardedDataParallel.fsdp_modules(model))


# -- policies --


def _policy(value: Any) -> Any:
    def program(side: Side) -> None:
        side.wrap(two(), auto_wrap_policy=value(side))

    return program


POLICIES: dict[str, Any] = {
    "number": lambda side: 3,
    "text": lambda side: "linear",
    "class": lambda side: nn.Linear,
    "set": lambda side: {nn.Linear},
    "of_no_class": lambda side: side.policy_of(set()),
    "of_text": lambda side: side.policy_of({"Linear"}),
    "of_instance": lambda side: side.policy_of({linear()}),
    "custom_text": lambda side: side.custom_policy(lambda module: "yes"),
    "custom_none": lambda side: side.custom_policy(lambda module: None),
    "custom_number": lambda side: side.custom_policy(lambda module: 1),
    "custom_unknown_argument": lambda side: side.custom_policy(lambda module: {"nonsense": 1}),
    "custom_raises": lambda side: side.custom_policy(lambda module: [][1]),
    "custom_no_function": lambda side: side.custom_policy(3),
    "function_without_arguments": lambda side: lambda: True,
    "function_two_arguments": lambda side: lambda module, recurse: True,
    "function_raises": lambda side: lambda module, recurse, nonwrapped_numel: [][1],
    "function_partial": lambda side: functools.partial(
        lambda module, recurse, nonwrapped_numel, kind: True, kind=nn.Linear
    ),
    "function_none": lambda side: lambda module, recurse, nonwrapped_numel: None,
}
TABLE.family("policy_", {name: _policy(value) for name, value in POLICIES.items()})


@row()
def policy_over_wrapped(side: Side) -> None:
    module = two()
    module[0] = side.wrap(module[0])
    side.wrap(module, auto_wrap_policy=side.policy_of({nn.Linear}))


@row()
def policy_function_over_wrapped(side: Side) -> None:
    module = two()
    module[0] = side.wrap(module[0])
    side.wrap(module, auto_wrap_policy=lambda module, recurse, nonwrapped_numel: True)


@row()
def batch_norm_with_precision(side: Side) -> None:
    module = nn.Sequential(linear(), nn.BatchNorm1d(8))
    precision = side.api.MixedPrecision(param_dtype=torch.bfloat16)
    side.wrap(module, auto_wrap_policy=side.policy_of({nn.Linear}), mixed_precision=precision)


@row()
def batch_norm_with_precision_by_function(side: Side) -> None:
    module = nn.Sequential(linear(), nn.BatchNorm1d(8))
    precision = side.api.MixedPrecision(param_dtype=torch.bfloat16)
    side.wrap(
        module, auto_wrap_policy=lambda module, recurse, nonwrapped_numel: True, mixed_precision=precision
    )


@row()
def batch_norm_with_precision_and_no_policy(side: Side) -> None:
    module = nn.Sequential(linear(), nn.BatchNorm1d(8))
    side.wrap(module, mixed_precision=side.api.MixedPrecision(param_dtype=torch.bfloat16))


@row()
def precision_of_no_class(side: Side) -> None:
    precision = side.api.MixedPrecision(param_dtype=torch.bfloat16, _module_classes_to_ignore=())
    side.wrap(two(), auto_wrap_policy=side.policy_of({nn.Linear}), mixed_precision=precision)


# -- settings --


def _arguments(**arguments: Any) -> Any:
    def program(side: Side) -> None:
        trained(side, linear(), **arguments)

    return program


SETTINGS: dict[str, Any] = {
    "precision_text": {"mixed_precision": "bf16"},
    "precision_dtype": {"mixed_precision": torch.bfloat16},
    "offload_true": {"cpu_offload": True},
    "offload_text": {"cpu_offload": "yes"},
    "prefetch_text": {"backward_prefetch": "BACKWARD_PRE"},
    "prefetch_number": {"backward_prefetch": 4},
    "forward_prefetch_text": {"forward_prefetch": "yes"},
    "unknown_argument": {"nonsense": 1},
    "sync_text": {"sync_module_states": "yes"},
    "limit_none": {"limit_all_gathers": None},
    "originals_text": {"use_orig_params": "yes"},
}
TABLE.family("setting_", {name: _arguments(**value) for name, value in SETTINGS.items()})


def _mixed(**inner: Any) -> Any:
    def program(side: Side) -> None:
        module = two()
        module[0] = side.wrap(module[0], **inner)
        trained(side, module)

    return program


MIXED: dict[str, Any] = {
    "originals": {"use_orig_params": True},
    "limit": {"limit_all_gathers": False},
    "prefetch": {"backward_prefetch": None},
    "forward_prefetch": {"forward_prefetch": True},
}
TABLE.family("mixed_", {name: _mixed(**value) for name, value in MIXED.items()})


@row()
def mixed_strategies(side: Side) -> None:
    module = two()
    module[0] = side.wrap(module[0])
    side.strategy = side.api.ShardingStrategy.NO_SHARD
    trained(side, module)


@row(**BOTH)
def checkpoint_wrapper_inside(side: Side) -> None:
    trained(side, nn.Sequential(checkpoint_wrapper(linear()), linear()))


@row(**BOTH)
def optimizer_in_backward_before(side: Side) -> None:
    module = two()
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    trained(side, module)


@row(**BOTH)
def optimizer_in_backward_after(side: Side) -> None:
    model = side.wrap(two())
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    model(x()).sum().backward()
    model(x()).sum().backward()


# -- wrap, enable_wrap --


@row()
def enable_wrap_nested(side: Side) -> None:
    wrapping = side.wrapping()
    kind = side.api.FullyShardedDataParallel
    with wrapping.enable_wrap(wrapper_cls=kind, device_id=CPU):
        with wrapping.enable_wrap(wrapper_cls=kind, device_id=CPU):
            wrapping.wrap(linear())


@row()
def enable_wrap_without_class(side: Side) -> None:
    with side.wrapping().enable_wrap():
        pass


@row()
def enable_wrap_unknown(side: Side) -> None:
    wrapping = side.wrapping()
    with wrapping.enable_wrap(wrapper_cls=side.api.FullyShardedDataParallel, nonsense=1):
        wrapping.wrap(linear())


@row()
def wrap_outside(side: Side) -> str:
    return type(side.wrapping().wrap(linear())).__name__
